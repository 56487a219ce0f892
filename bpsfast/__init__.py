"""bpsfast: gradients summed by summation services on spare CPUs and NICs (the BytePS architecture).

    import bpsfast
    bpsfast.init()
    mean = bpsfast.push_pull(gradient, name="layer1")
    bpsfast.shutdown()

Public names are listed here and nowhere else; they are loaded at first use, so that importing the package (or one
of its light modules, as the launcher and the daemons do) costs nothing: no NumPy, no framework, no compiled kernel.
PyTorch users import `bpsfast.torch`.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .broadcaster import broadcast as broadcast
    from .current import (
        barrier as barrier,
    )
    from .current import (
        init as init,
    )
    from .current import (
        local_rank as local_rank,
    )
    from .current import (
        local_size as local_size,
    )
    from .current import (
        rank as rank,
    )
    from .current import (
        shutdown as shutdown,
    )
    from .current import (
        size as size,
    )
    from .current import (
        stats as stats,
    )
    from .gradients import Gradients as Gradients
    from .handle import (
        Handle as Handle,
    )
    from .handle import (
        declare as declare,
    )
    from .handle import (
        empty as empty,
    )
    from .handle import (
        poll as poll,
    )
    from .handle import (
        push_pull as push_pull,
    )
    from .handle import (
        push_pull_async as push_pull_async,
    )
    from .handle import (
        synchronize as synchronize,
    )
    from .orchestration.errors import (
        BpsError as BpsError,
    )
    from .orchestration.errors import (
        BusyError as BusyError,
    )
    from .orchestration.errors import (
        CapacityError as CapacityError,
    )
    from .orchestration.errors import (
        ClosedError as ClosedError,
    )
    from .orchestration.errors import (
        ConfigError as ConfigError,
    )
    from .orchestration.errors import (
        MismatchError as MismatchError,
    )
    from .orchestration.errors import (
        PeerLostError as PeerLostError,
    )
    from .orchestration.errors import (
        ProtocolError as ProtocolError,
    )
    from .orchestration.errors import (
        StallError as StallError,
    )
    from .orchestration.errors import (
        UnsupportedError as UnsupportedError,
    )

_HOME = {
    "current": ("init", "shutdown", "rank", "size", "local_rank", "local_size", "barrier", "stats"),
    "handle": ("Handle", "push_pull", "push_pull_async", "poll", "synchronize", "declare", "empty"),
    "broadcaster": ("broadcast",),
    "gradients": ("Gradients",),
    "orchestration.errors": (
        "BpsError", "BusyError", "CapacityError", "ClosedError", "ConfigError", "MismatchError", "PeerLostError",
        "ProtocolError", "StallError", "UnsupportedError",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as exc:
        if not (exc.name or "").startswith("bpsfast.pyx"):
            raise
        raise ImportError(
            f"bpsfast.{name} needs the native module {exc.name}, which is not built in {__path__[0]!r}. "
            "Install the package (pip install . or pip install -e . in the source tree, with a C compiler), "
            "and do not run Python from inside a source tree that was not installed."
        ) from exc
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
