"""bpsfast: gradients summed by summation services on spare CPUs and NICs (the BytePS architecture).

    import bpsfast
    bpsfast.init()
    mean = bpsfast.push_pull(gradient, name="layer1")
    bpsfast.shutdown()

Public names are listed here. Each is loaded at its first use, so importing the package, or one of its light modules as
launcher and daemons do, loads no NumPy, no framework and no compiled kernel. PyTorch users import `bpsfast.torch`.
"""
from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _renamed
from ._version import __version__ as __version__
from .base import hooks

if TYPE_CHECKING:
    from . import compression as compression
    from .orchestration.errors import (
        BpsError as BpsError,
        BusyError as BusyError,
        CapacityError as CapacityError,
        ClosedError as ClosedError,
        ConfigError as ConfigError,
        DeviceError as DeviceError,
        LackingError as LackingError,
        MismatchError as MismatchError,
        PeerLostError as PeerLostError,
        ProtocolError as ProtocolError,
        StallError as StallError,
        UnsupportedError as UnsupportedError,
    )
    from .trainer.async_weights import AsyncWeights as AsyncWeights
    from .trainer.broadcaster import broadcast as broadcast
    from .trainer.gradients import Gradients as Gradients
    from .trainer.handle import (
        Handle as Handle,
        declare as declare,
        empty as empty,
        poll as poll,
        push_pull as push_pull,
        push_pull_async as push_pull_async,
        synchronize as synchronize,
    )
    from .trainer.preemption import preempted as preempted
    from .trainer.process import (
        barrier as barrier,
        init as init,
        local_rank as local_rank,
        local_size as local_size,
        losses as losses,
        members as members,
        on_ranks_lost as on_ranks_lost,
        rank as rank,
        shutdown as shutdown,
        size as size,
    )
    from .trainer.sparse_table import push_pull_rows as push_pull_rows
    from .trainer.stats import (
        contributors as contributors,
        counters as counters,
        get_pushpull_speed as get_pushpull_speed,
        stalls as stalls,
        stats as stats,
    )

_HOME = {
    "trainer.process": ("init", "shutdown", "rank", "size", "local_rank", "local_size", "barrier", "members", "losses",
                        "on_ranks_lost"),
    "trainer.preemption": ("preempted",),
    "trainer.stats": ("contributors", "counters", "get_pushpull_speed", "stalls", "stats"),
    "trainer.handle": ("Handle", "push_pull", "push_pull_async", "poll", "synchronize", "declare", "empty"),
    "trainer.async_weights": ("AsyncWeights",),
    "trainer.broadcaster": ("broadcast",),
    "trainer.sparse_table": ("push_pull_rows",),
    "trainer.gradients": ("Gradients",),
    "orchestration.errors": (
        "BpsError", "BusyError", "CapacityError", "ClosedError", "ConfigError", "DeviceError", "LackingError",
        "MismatchError", "PeerLostError", "ProtocolError", "StallError", "UnsupportedError")}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

_renamed.install()
__all__ = sorted([*_MODULE_OF, "compression"])


def __getattr__(name: str) -> object:
    if name == "compression":
        return import_module(".compression", __name__)
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
            "and do not run Python from inside a source tree that was not installed.") from exc
    globals()[name] = found
    return found


def _late(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports *module* at each call, and calls its *name*."""
    return lambda *args: getattr(import_module(f".{module}", __name__), name)(*args)


hooks.make_islands = _late("collectives.islands", "Islands")
hooks.open_elastic_client = _late("elastic.coordinator_client", "open_client")
hooks.current_elastic_client = _late("elastic.coordinator_client", "current_client")
hooks.add_torch_backend = _late("torch_autoload", "add_backend")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
