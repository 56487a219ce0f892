"""Arrays of one rank given to all, after a list of what they are, which is compared."""
from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..orchestration.errors import MismatchError
from . import process
from .broadcast_manifest import difference
from .broadcaster import broadcast_bytes, check_root

Array = np.ndarray[Any, Any]


def broadcast_arrays(named: Sequence[tuple[str, Array]], root_rank: int, title: str) -> list[Array]:
    """Return the arrays of rank *root_rank*'s *named* (new ones, but on *root_rank*). All ranks call it in one order.

    Parameters
    ----------
    named
        C-contiguous arrays of any dtype without references, and their names: the same on all ranks.
    title
        Is checked to agree.

    Raises
    ------
    MismatchError
        If the ranks' arrays differ in name, dtype or shape; the text names the first that does.
    ConfigError, StallError, PeerLostError
        As `bpsfast.broadcast`.
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
        session.broadcaster.send(text, _pieces(arrays))
        return arrays
    wrong = difference(mine, theirs, "array", session.rank, root_rank)
    received = [np.empty(array.shape, array.dtype) for array in arrays]
    # What does not fit is received all the same, so that the channel stays in step.
    session.broadcaster.receive(root_rank, text, lambda nbytes: [] if wrong else _pieces(received))
    if wrong:
        raise MismatchError(wrong)
    return received


def _pieces(arrays: Sequence[Array]) -> list[tuple[int, int]]:
    return [(array.ctypes.data, array.nbytes) for array in arrays]
