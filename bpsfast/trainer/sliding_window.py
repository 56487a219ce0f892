"""Sliding window: how private memory goes through a unit within one machine, a few partitions at a time.

A tensor that is copied in as a whole, summed as a whole and copied out as a whole goes through the caches three times,
and through memory as often if it is larger than they are. Here each partition is copied out soon after it was copied
in: what it was copied from, its input in shared memory and its sum are in the caches then.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .leg import LEG

if TYPE_CHECKING:
    from collections.abc import Callable

    from .memory import Region

Array = np.ndarray[tuple[int, ...], np.dtype[np.void]]

#: Least and most partitions on their way at once: while some are copied others are summed, and more of them would leave
#: the caches.
_SLOTS = 4, 8


def n_slots(local_size: int) -> int:
    """Return how many partitions are on their way at once where *local_size* ranks share a machine."""
    return min(max(_SLOTS[0], local_size), _SLOTS[1])


class SlidingWindow:
    """The legs of *n_parts* partitions, *stride* bytes apart, of *nbytes* together, from *first_part* on.

    They take turns in *window*, *slots* partitions long. *result_address* tells where a byte of the result of an even
    or odd round lies. One thread at a time.
    """

    def __init__(self, window: Region, slots: int, first_part: int, n_parts: int, stride: int, nbytes: int,
                 result_address: Callable[[int, int], int]) -> None:
        self.slots = slots
        self._at = at = np.arange(n_parts, dtype=np.uint64) * np.uint64(stride)
        self._legs = np.zeros(n_parts, LEG)
        turns = at % np.uint64(slots * stride)
        self._legs["nbytes"] = np.minimum(np.uint64(stride), np.uint64(nbytes) - at)
        self._legs["staging"] = turns + np.uint64(window.address)
        self._legs["offset"] = turns + np.uint64(window.offset)
        self._legs["segment"] = window.segment
        self._legs["part"] = np.arange(first_part, first_part + n_parts)
        self._results = [np.array([result_address(parity, int(offset)) for offset in at], np.uint64)
                         for parity in (0, 1)]

    def legs(self, source: int, destination: int, round: int) -> Array:
        """Return the legs of *round* from *source* to *destination*, both addresses, valid until the next call."""
        self._legs["source"] = self._at + np.uint64(source)
        self._legs["destination"] = self._at + np.uint64(destination)
        self._legs["result"] = self._results[round & 1]
        self._legs["round"] = round
        return self._legs
