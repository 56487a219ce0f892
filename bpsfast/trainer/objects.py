"""An object of one rank given to all, pickled."""
from __future__ import annotations

import importlib.util
import pickle
from typing import Any

from . import current as process
from .broadcaster import broadcast_bytes, check_root


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return rank *root_rank*'s *obj* on all ranks (a copy elsewhere), which call their broadcasts in one order.

    It is pickled, by cloudpickle if that is installed. Only members of the job, who know its key, can send one. *name*
    is checked to agree.

    Raises
    ------
    ConfigError, MismatchError, StallError, PeerLostError
        As `bpsfast.broadcast`.
    """
    session = process.current()
    check_root(session, root_rank)
    is_root = session.rank == root_rank
    data = broadcast_bytes(dump(obj) if is_root else None, root_rank, f"object {name or ''}")
    return obj if is_root else pickle.loads(data)


def dump(obj: Any) -> bytes:
    """Return *obj* pickled, by cloudpickle if that is installed."""
    if importlib.util.find_spec("cloudpickle") is None:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    import cloudpickle

    return bytes(cloudpickle.dumps(obj))
