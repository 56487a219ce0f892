"""Who pushes a unit, as one node sees it: all ranks of the job, or those of a group."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..orchestration.messages import NodeInfo
from .transport import Link, wire


@dataclass(frozen=True)
class Members:
    """`nodes`: those with such ranks, in node order; `wired` of them are reached from here over a wire. `local`: the
    engine's sources of such ranks here, in local-rank order."""

    n_ranks: int
    nodes: tuple[int, ...]
    wired: tuple[int, ...]
    local: tuple[int, ...]


def members_of(ranks: Sequence[int], me: NodeInfo, nodes: Sequence[NodeInfo], links: Mapping[int, Link],
               local: Sequence[int]) -> Members:
    """Return who pushes what is of *ranks* (empty: of all); *local* are the sources of *me*'s ranks."""
    chosen = set(ranks) if ranks else {rank for node in nodes for rank in node.ranks}
    with_ranks = tuple(node.index for node in nodes if not chosen.isdisjoint(node.ranks))
    return Members(
        n_ranks=len(chosen), nodes=with_ranks,
        wired=tuple(index for index in with_ranks if wire(links.get(index)) is not None),
        local=tuple(source for source, rank in zip(local, me.ranks) if rank in chosen))
