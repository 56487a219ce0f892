"""Horovod's API over bpsfast: for PyTorch here and in `torch`, for TensorFlow in `tensorflow`, for Keras in `keras`.

    import bpsfast.hvd as hvd                                   # instead of: import horovod.torch as hvd
    import bpsfast.hvd.tensorflow as hvd                        # instead of: import horovod.tensorflow as hvd

Each module imports its framework; this one imports PyTorch at the first use of a name.
"""
from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .torch import *  # noqa: F403
    from .torch import __all__ as __all__


def __getattr__(name: str) -> object:
    """Return *name* of `bpsfast.hvd.torch`."""
    if name == "elastic":  # programs use it without importing it
        return importlib.import_module(f"{__name__}.elastic")
    is_special = name.startswith("__") and name != "__all__"
    if not is_special and importlib.util.find_spec(f"{__name__}.{name}") is None:  # submodules are imported as usual
        api = importlib.import_module(f"{__name__}.torch")
        if name in api.__all__ or name == "__all__":
            found = globals()[name] = getattr(api, name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
