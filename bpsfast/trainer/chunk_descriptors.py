"""Chunk descriptors: where the rank's port copies the input of each partition from, and its result to.

`Port.pipelined_transfer` takes a table of them.

`SlidingWindow` sends private memory through a unit of one machine, a few partitions at a time. A tensor that is copied
in, summed and copied out as a whole goes through the caches three times, and through memory as often if it is larger
than they are. Here each partition is copied out soon after it was copied in, while its input and its sum are still in
the caches.
"""
from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from ..orchestration.messages import MemberPlan
from .input_memory import Region

Array = np.ndarray[tuple[int, ...], np.dtype[np.void]]
Offsets = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

#: `pipelined_transfer.h: bps_chunk`.
CHUNK_DTYPE = np.dtype([
    ("source", "<u8"), ("destination", "<u8"), ("nbytes", "<u8"), ("staging", "<u8"), ("result", "<u8"),
    ("offset", "<u8"), ("part", "<u4"), ("round", "<u4"), ("segment", "<u2"), ("flags", "<u2"), ("pad", "<u4")])

assert CHUNK_DTYPE.itemsize == 64, "pipelined_transfer.h says so"
#: Least and most partitions under way at once: some are copied while others are summed; more would leave the caches.
_AT_ONCE = 4, 8


class PartitionedUnit(Protocol):
    """What chunk descriptors and waits need of a `Unit`, whose module imports theirs."""

    name: str
    members: dict[str, MemberPlan]
    nbytes: int
    stride: int
    n_parts: int
    first_part: int
    needed: Collection[int]

    def result_address(self, round: int, offset: int) -> int: ...
    def lost_in(self, round: int) -> frozenset[int]: ...


def chunk_table(unit: PartitionedUnit, region: Region, places: Offsets) -> Array:
    """Return a descriptor for each partition of *unit*, with inputs at *places* in *region*; no source or size yet."""
    chunks = np.zeros(unit.n_parts, CHUNK_DTYPE)
    chunks["staging"] = places + np.uint64(region.address)
    chunks["offset"] = places + np.uint64(region.offset)
    chunks["segment"] = region.segment
    chunks["part"] = np.arange(unit.first_part, unit.first_part + unit.n_parts)
    return chunks


def offsets(unit: PartitionedUnit) -> Offsets:
    """Return where in *unit* each of its partitions begins."""
    return np.arange(unit.n_parts, dtype=np.uint64) * np.uint64(unit.stride)


def results(unit: PartitionedUnit) -> Offsets:
    """Return where the result of each partition lies in this process, of shape (2, partitions): even and odd rounds."""
    return np.array([[unit.result_address(parity, int(at)) for at in offsets(unit)] for parity in (0, 1)], np.uint64)


def n_at_once(local_size: int) -> int:
    """Return how many partitions are under way at once where *local_size* ranks share a machine."""
    return min(max(_AT_ONCE[0], local_size), _AT_ONCE[1])


def is_worth(n_parts: int, local_size: int) -> bool:
    """Return whether a sliding window pays for *n_parts* partitions: with fewer, most are under way at once."""
    return n_parts >= 2 * n_at_once(local_size)


class SlidingWindow:
    """The partitions of *unit* take turns in *region*, which has room for *at_once* of them. One thread at a time."""

    def __init__(self, unit: PartitionedUnit, region: Region, at_once: int) -> None:
        self.at_once = at_once
        self._at = offsets(unit)
        self._chunks = chunk_table(unit, region, self._at % np.uint64(at_once * unit.stride))
        self._chunks["nbytes"] = np.minimum(np.uint64(unit.stride), np.uint64(unit.nbytes) - self._at)
        self._results = results(unit)

    def chunks(self, source: int, destination: int, round: int) -> Array:
        """Return the descriptors of *round* from address *source* to *destination*, valid until the next call."""
        self._chunks["source"] = self._at + np.uint64(source)
        self._chunks["destination"] = self._at + np.uint64(destination)
        self._chunks["result"] = self._results[round & 1]
        self._chunks["round"] = round
        return self._chunks
