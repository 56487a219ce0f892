"""Broadcasts of arrays and of pickled objects from one rank to all."""
from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..orchestration.errors import MismatchError, UnsupportedError
from . import process
from .broadcaster import Broadcaster, broadcast_bytes, check_root

Array = np.ndarray[Any, Any]
#: (name, dtype, shape) of each tensor, in order.
Manifest = Sequence[Sequence[Any]]


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return rank *root_rank*'s *obj* on all ranks (a copy elsewhere), which call their broadcasts in the same order.

    It is pickled, by cloudpickle if that is installed. Only members of the job, which know its key, can send one.
    *name* must agree.

    Raises
    ------
    UnsupportedError
        If rank *root_rank* could not pickle it; that rank raises the original error.
    ConfigError, MismatchError, StallError, PeerLostError
        As `bpsfast.broadcast`.
    """
    session = process.current()
    check_root(session, root_rank)
    is_root = session.rank == root_rank
    data, error = dump_or_say_why(obj, session.rank) if is_root else (None, None)
    data = broadcast_bytes(data, root_rank, f"object {name or ''}")
    if error is not None:
        raise error
    return obj if is_root else load(data)


class _Unsent(NamedTuple):
    """Sent in place of an object that *rank* could not pickle."""

    rank: int
    reason: str


def dump_or_say_why(obj: Any, rank: int) -> tuple[bytes, Exception | None]:
    """Return the bytes that *rank* sends for *obj*, and the error if it could not be pickled.

    The other ranks wait for bytes in any case; there `load` raises the error.
    """
    try:
        return dump(obj), None
    except Exception as exc:  # whatever the object's own methods raise
        return dump(_Unsent(rank, f"{type(exc).__name__}: {exc}")), exc


def load(data: bytes) -> Any:
    """Return the object in *data*; raises `UnsupportedError` if its sender could not pickle it."""
    found = pickle.loads(data)
    if isinstance(found, _Unsent):
        raise UnsupportedError(f"rank {found.rank} could not pickle the object of a broadcast: {found.reason}")
    return found


def dump(obj: Any) -> bytes:
    """Return *obj* pickled, by cloudpickle if that is installed."""
    if importlib.util.find_spec("cloudpickle") is None:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    import cloudpickle

    return bytes(cloudpickle.dumps(obj))


def broadcast_arrays(named: Sequence[tuple[str, Array]], root_rank: int, title: str) -> list[Array]:
    """Return the arrays of rank *root_rank*'s *named* (new ones, except on *root_rank*).

    All ranks call it in the same order. *named*: C-contiguous arrays of any dtype without references, and their names:
    the same on all ranks. *title*: must agree. Raises `MismatchError` if the ranks' arrays differ in name, dtype or
    shape; the text names the first that does. Raises `ConfigError`, `StallError` or `PeerLostError` as
    `bpsfast.broadcast`.
    """
    session = process.current()
    check_root(session, root_rank)
    is_root = session.rank == root_rank
    arrays = [array for _, array in named]
    mine = [[name, str(array.dtype), list(array.shape)] for name, array in named]
    text = f"list of {title}"
    theirs = json.loads(broadcast_bytes(json.dumps(mine).encode() if is_root else None, root_rank, text))
    if session.size == 1:
        return arrays
    text = f"{len(theirs)} {title}"
    if is_root:
        session.extension(Broadcaster).send(text, _pieces(arrays))
        return arrays
    wrong = difference(mine, theirs, "array", session.rank, root_rank)
    received = [np.empty(array.shape, array.dtype) for array in arrays]
    # A mismatch is received and dropped, so that the channel stays in step.
    session.extension(Broadcaster).receive(root_rank, text, lambda nbytes: [] if wrong else _pieces(received))
    if wrong:
        raise MismatchError(wrong)
    return received


def _pieces(arrays: Sequence[Array]) -> list[tuple[int, int]]:
    return [(array.ctypes.data, array.nbytes) for array in arrays]


def difference(mine: Manifest, theirs: Manifest, what: str, rank: int, root_rank: int) -> str:
    """Return in words the first difference of *mine* (of *rank*) and *theirs* (of *root_rank*); "" if none."""
    for number, (own, other) in enumerate(zip(mine, theirs)):
        if own != other:
            return (f"{what} {number} of the broadcast differs: rank {rank} has {own[0]} ({own[1]}, shape {own[2]}), "
                    f"rank {root_rank} has {other[0]} ({other[1]}, shape {other[2]})")
    if len(mine) != len(theirs):
        return f"the broadcast is of {len(theirs)} {what}s on rank {root_rank}, of {len(mine)} on rank {rank}"
    return ""
