"""The error classes of Horovod's API.

A wrong call raises a `ValueError` before anything is submitted. An operation that fails after it was submitted raises a
`HorovodInternalError`, which is also an instance of one of bpsfast's own error classes.
"""
from __future__ import annotations

from ..orchestration.errors import BpsError, BusyError, ClosedError, UnsupportedError


class HorovodInternalError(RuntimeError):
    """A collective operation failed."""


class NotInitializedError(ClosedError, ValueError):
    """`init` was not called, or `shutdown` was. Call `init` first."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class TensorTypeError(UnsupportedError, ValueError):
    """An input is not a tensor, or its dtype, layout or device is not supported. Convert it first."""


class DuplicateNameError(BusyError, ValueError):
    """A name was used again while its operation is under way. Wait for the first one, or use another name."""

    def __init__(self, name: str) -> None:
        super().__init__("Requested to allreduce, allgather, or broadcast a tensor with the same name as another "
                         "tensor that is currently being processed.  If you want to request another tensor, use a "
                         f"different tensor name. ({name})")


class AdasumError(UnsupportedError, NotImplementedError, ValueError):
    """The reduction Adasum is not supported. Use Average or Sum."""

    def __init__(self) -> None:
        super().__init__("op=Adasum is not there: bpsfast.hvd reduces by Average, Sum, Min, Max and Product")


def internal(error: BpsError) -> BpsError:
    """Return an error of the class of *error* and of `HorovodInternalError`; its cause is *error*."""
    if isinstance(error, HorovodInternalError):
        return error
    kind = type(error)
    if kind not in _BOTH:
        _BOTH[kind] = type(kind.__name__, (HorovodInternalError, kind), {"__doc__": kind.__doc__})
    both = _BOTH[kind](str(error))
    both.__cause__ = error
    return both


_BOTH: dict[type[BpsError], type[BpsError]] = {}
