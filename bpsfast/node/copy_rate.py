"""How fast the summing threads of this node copy: what the choice of compression scales the kernels' ratios with."""
from __future__ import annotations

import os
import time

import numpy as np

from ..base.settings import Settings
from ..pyx.port import copy

#: Of each buffer: a partition's, which the caches keep from one copy to the next, as they keep what was just summed.
_NBYTES = 4 << 20
_N_COPIES = 3
_MOST_THREADS = 8


def n_threads(settings: Settings) -> int:
    """Return how many threads sum on this node."""
    return settings.engine_threads or min(len(os.sched_getaffinity(0)), _MOST_THREADS)


def measure(threads: int) -> float:
    """Return bytes/s: what one thread copies, its best of a few tries within about 5 ms, times *threads*.

    Threads that share a memory bus copy less together, but what is scaled with this are mostly kernels that compute.
    """
    source, target = np.ones(_NBYTES, np.uint8), np.ones(_NBYTES, np.uint8)
    best_s = float("inf")
    for _ in range(_N_COPIES):
        begin = time.perf_counter()
        copy(target.ctypes.data, source.ctypes.data, _NBYTES)
        best_s = min(best_s, time.perf_counter() - begin)
    return threads * _NBYTES / best_s
