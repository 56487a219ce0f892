"""Bytes of any length among the members of a group, which need not know how many there are."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..trainer.tensor_input import from_array

if TYPE_CHECKING:
    from .group import Group


def broadcast_bytes(group: Group, data: bytes, root: int) -> bytes:
    """Return the *data* of the *root*-th member; others' is not looked at. Collective; raises as `Group`'s calls."""
    length = np.array([len(data)], np.int64)
    group.broadcast(from_array(length), root)
    whole = np.frombuffer(data, np.uint8).copy() if group.rank == root else np.empty(int(length[0]), np.uint8)
    if whole.nbytes:
        group.broadcast(from_array(whole), root)
    return whole.tobytes()


def all_gather_bytes(group: Group, data: bytes) -> list[bytes]:
    """Return the *data* of all members, in their order. Collective; raises as `Group`'s calls."""
    lengths = [np.empty(1, np.int64) for _ in range(group.size)]
    group.all_gather(from_array(np.array([len(data)], np.int64)), [from_array(length) for length in lengths])
    wholes = [np.empty(int(length[0]), np.uint8) for length in lengths]
    group.all_gather(from_array(np.frombuffer(data, np.uint8).copy()), [from_array(whole) for whole in wholes])
    return [whole.tobytes() for whole in wholes]
