"""Lists of what a broadcast gives to all, compared."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: (name, dtype, shape) of each tensor, in order.
Manifest = Sequence[Sequence[Any]]


def difference(mine: Manifest, theirs: Manifest, what: str, rank: int, root_rank: int) -> str:
    """Say how *mine*, of *rank*, differs first from *theirs*, of *root_rank*; "" if not. *what*: "tensor", "array"."""
    for number, (own, other) in enumerate(zip(mine, theirs)):
        if own != other:
            return (f"{what} {number} of the broadcast differs: rank {rank} has {own[0]} ({own[1]}, shape {own[2]}), "
                    f"rank {root_rank} has {other[0]} ({other[1]}, shape {other[2]})")
    if len(mine) != len(theirs):
        return f"the broadcast is of {len(theirs)} {what}s on rank {root_rank}, of {len(mine)} on rank {rank}"
    return ""
