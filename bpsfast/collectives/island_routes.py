"""Which GPUs sum a partition before memory does, and which of them copies it: a machine's strategy, partition by
partition. Pure.

A strategy speaks of fractions; partitions go one way each. Which, follows from the partition's number alone, so that
all ranks of a machine say the same without a word: multiples of the golden ratio modulo 1 fill fractions evenly,
whatever numbers a model gets.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..hardware.topology.strategy_solver import NOTHING, Strategy

_GOLDEN = 0.6180339887498949


class Route(msgspec.Struct, frozen=True):
    """One way of a strategy in terms of ranks: `share` of all partitions; of each island how much each root copies."""

    share: float
    islands: tuple[tuple[int, ...], ...]
    roots: tuple[tuple[tuple[int, float], ...], ...]


class PartitionRoute(msgspec.Struct, frozen=True):
    """How a rank's input of one partition goes: with those of *island*, all to *root*, who copies it."""

    island: tuple[int, ...]
    root: int


class IslandRoutes(msgspec.Struct, frozen=True):
    """All roads of one machine."""

    roads: tuple[Route, ...]

    def partition_route(self, part: int, rank: int) -> PartitionRoute:
        """Return how *rank*'s input of the job's partition *part* goes; alone where it is in no island."""
        at = part * _GOLDEN % 1.0
        for road in self.roads:
            if at < road.share or road is self.roads[-1]:
                return _leg(road, at / road.share if road.share else 0.0, rank)
            at -= road.share
        return PartitionRoute((rank,), rank)

    def islands(self) -> list[tuple[int, ...]]:
        """Return every island of more than one rank, in an order that is the same on all ranks."""
        return sorted({island for road in self.roads for island in road.islands if len(island) > 1})


def _leg(road: Route, at: float, rank: int) -> PartitionRoute:
    for island, roots in zip(road.islands, road.roots):
        if rank not in island:
            continue
        for root, part in roots:
            if at < part:
                return PartitionRoute(island, root)
            at -= part
        return PartitionRoute(island, roots[-1][0])
    return PartitionRoute((rank,), rank)


def routes(strategy: Strategy, rank_of: Mapping[str, int]) -> IslandRoutes:
    """Return the roads of *strategy*, whose GPUs are those of ranks as *rank_of* says; others of its GPUs have none."""
    roads = []
    for way in strategy.ways:
        parts = way.roots()
        islands, roots = [], []
        for gpus in way.islands:
            members = [gpu for gpu in gpus if gpu in rank_of]
            if members:
                islands.append(tuple(rank_of[gpu] for gpu in members))
                roots.append(_shares([(rank_of[gpu], parts.get(gpu, 0.0)) for gpu in members]))
        roads.append(Route(way.share, tuple(islands), tuple(roots)))
    return IslandRoutes(tuple(roads))


def shared_routes(gpu_of: Sequence[tuple[int, str]]) -> IslandRoutes:
    """Return the road of a machine whose (rank, GPU) are *gpu_of*: those who share a GPU are an island, and copy equal
    parts.
    """
    gpus: dict[str, list[int]] = {}
    for rank, gpu in sorted(gpu_of):
        gpus.setdefault(gpu, []).append(rank)
    islands = tuple(tuple(ranks) for ranks in gpus.values())
    return IslandRoutes((Route(1.0, islands, tuple(_shares([(rank, 0.0) for rank in ranks]) for ranks in islands)),))


def _shares(parts: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return those of *parts* that are something, as fractions of their sum; equal ones if none is."""
    some = [(rank, part) for rank, part in parts if part > NOTHING] or [(rank, 1.0) for rank, _ in parts]
    total = sum(part for _, part in some)
    return tuple((rank, part / total) for rank, part in some)
