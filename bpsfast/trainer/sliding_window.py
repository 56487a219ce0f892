"""Sliding window: how private memory goes through a unit within one machine, a few partitions at a time.

A tensor that is copied in as a whole, summed as a whole and copied out as a whole goes through the caches three times,
and through memory as often if it is larger than they are. Here each partition is copied out soon after it was copied
in: what it was copied from, its input in shared memory and its sum are in the caches then.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .chunk_descriptors import Array, chunk_table, offsets, results

if TYPE_CHECKING:
    from .input_memory import Region
    from .unit import Unit

#: Least and most partitions on their way at once: while some are copied others are summed, and more of them would leave
#: the caches.
_SLOTS = 4, 8


def n_slots(local_size: int) -> int:
    """Return how many partitions are on their way at once where *local_size* ranks share a machine."""
    return min(max(_SLOTS[0], local_size), _SLOTS[1])


def is_worth(n_parts: int, local_size: int) -> bool:
    """Tell whether private memory of *n_parts* partitions gains by it: of fewer, most are on their way at once."""
    return n_parts >= 2 * n_slots(local_size)


class SlidingWindow:
    """The way of *unit*'s partitions through *region*, *slots* partitions long, in turns. One thread at a time."""

    def __init__(self, unit: Unit, region: Region, slots: int) -> None:
        self.slots = slots
        self._at = offsets(unit)
        self._legs = chunk_table(unit, region, self._at % np.uint64(slots * unit.stride))
        self._legs["nbytes"] = np.minimum(np.uint64(unit.stride), np.uint64(unit.nbytes) - self._at)
        self._results = results(unit)

    def chunks(self, source: int, destination: int, round: int) -> Array:
        """Return the legs of *round* from *source* to *destination*, both addresses, valid until the next call."""
        self._legs["source"] = self._at + np.uint64(source)
        self._legs["destination"] = self._at + np.uint64(destination)
        self._legs["result"] = self._results[round & 1]
        self._legs["round"] = round
        return self._legs
