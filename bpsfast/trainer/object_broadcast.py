"""An object of one rank given to all, pickled."""
from __future__ import annotations

import importlib.util
import pickle
from typing import Any, NamedTuple

from ..orchestration.errors import UnsupportedError
from . import process
from .broadcaster import broadcast_bytes, check_root


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return rank *root_rank*'s *obj* on all ranks (a copy elsewhere), which call their broadcasts in one order.

    It is pickled, by cloudpickle if that is installed. Only members of the job, who know its key, can send one. *name*
    is checked to agree.

    Raises
    ------
    UnsupportedError
        If rank *root_rank* could not pickle it, where another error says why.
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
    """Travels in place of an object that *rank* could not pickle."""

    rank: int
    reason: str


def dump_or_say_why(obj: Any, rank: int) -> tuple[bytes, Exception | None]:
    """Return what *rank* sends for *obj*, and the error if that is only why it could not be pickled.

    The other ranks wait for it in any case, and `load` raises there.
    """
    try:
        return dump(obj), None
    except Exception as exc:  # whatever the object's own methods raise
        return dump(_Unsent(rank, f"{type(exc).__name__}: {exc}")), exc


def load(data: bytes) -> Any:
    """Return the object in *data*; raises `UnsupportedError` if its sender could not pickle it."""
    found = pickle.loads(data)
    if isinstance(found, _Unsent):
        raise UnsupportedError(f"rank {found.rank} could not pickle the object that it was to send: {found.reason}")
    return found


def dump(obj: Any) -> bytes:
    """Return *obj* pickled, by cloudpickle if that is installed."""
    if importlib.util.find_spec("cloudpickle") is None:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    import cloudpickle

    return bytes(cloudpickle.dumps(obj))
