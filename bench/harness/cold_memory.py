"""For benchmarks: sets of tensor partitions in memory that exceeds the caches, so that they are read from DRAM."""
from __future__ import annotations

from typing import Any

import numpy as np
import psutil

from bpsfast.base import dtypes
from bpsfast.bench.harness import machine_info

Array = np.ndarray[Any, Any]

PARTITION_NBYTES = 4 << 20
_UNKNOWN_CACHE_NBYTES = 64 << 20


def page_aligned(nbytes: int) -> Array:
    """Return a page-aligned array of *nbytes* bytes, zero or not yet touched."""
    raw = np.zeros(nbytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + nbytes]


class Pool:
    """Page-aligned sets of partitions in memory that exceeds the caches; the sets repeat cyclically."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = page_aligned(nbytes)
        self.nbytes = nbytes
        self._cursor = 0

    def fill(self, name: str) -> None:
        """Fill all memory with ones, so that every page exists and no element is subnormal or NaN."""
        self.bytes.view(dtypes.lookup(name).numpy)[:] = 1

    def take(self, n_arrays: int, name: str, temperature: str = "cold") -> list[Array]:
        """Return the next (cold) or the first (warm) *n_arrays* partitions as arrays of the dtype."""
        if temperature == "warm" or self._cursor + n_arrays * PARTITION_NBYTES > self.nbytes:
            self._cursor = 0
        start = self._cursor
        self._cursor += n_arrays * PARTITION_NBYTES
        whole = self.bytes[start : self._cursor].view(dtypes.lookup(name).numpy)
        return list(whole.reshape(n_arrays, -1))


def last_level_nbytes() -> int:
    """Return the size of the last-level cache, or a guess if the kernel does not report it."""
    return max(machine_info.caches().values(), default=_UNKNOWN_CACHE_NBYTES)


def cold_nbytes(quick: bool) -> int:
    """Return six times the last-level cache (quick: three times), at most a quarter of the free memory."""
    available = psutil.virtual_memory().available
    wanted = max((3 if quick else 6) * last_level_nbytes(), 256 << 20)
    nbytes = min(wanted, available // 4)
    if nbytes < 2 * last_level_nbytes():
        print(f"note: cold is not cold: the pool is {nbytes >> 20} MiB, the last-level cache "
              f"{last_level_nbytes() >> 20} MiB")
    return max(nbytes // PARTITION_NBYTES, 10) * PARTITION_NBYTES
