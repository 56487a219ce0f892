"""For `bench summation`: calls a function on partitions in DRAM, in one thread or in one thread per CPU."""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bpsfast.bench.harness.cold_memory import PARTITION_NBYTES, Array, Pool

Operation = Callable[[list[Array]], None]
_TIMEOUT_S = 120.0
_MOST_ARRAYS = 9


class Turn(NamedTuple):
    """Seconds of one call of all threads at once, and CPU seconds of one call of one thread."""

    wall_s: float
    cpu_s: float


class ThreadTeam:
    """*n_threads* threads, each with its own pool, which it touches first; a context manager.

    *pool_nbytes* is the size of all pools together. Operations must release the GIL.
    """

    def __init__(self, n_threads: int, pool_nbytes: int) -> None:
        self.n_threads = n_threads
        self._barrier = threading.Barrier(n_threads)
        own = max(pool_nbytes // n_threads // PARTITION_NBYTES, _MOST_ARRAYS) * PARTITION_NBYTES
        self._pools = [Pool(own) for _ in range(n_threads)]
        self._filled = ""
        self._threads = ThreadPoolExecutor(n_threads)

    def __enter__(self) -> ThreadTeam:
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown()

    def fill(self, name: str) -> None:
        """Fill all memory with ones of a dtype."""
        if name != self._filled:
            list(self._threads.map(lambda pool: pool.fill(name), self._pools))
            self._filled = name

    def turn(self, operation: Operation, n_arrays: int, name: str, n_calls: int) -> Turn:
        """Call *operation* on *n_arrays* partitions *n_calls* times in every thread, after one call that is not timed.

        All threads begin together; the time ends with the last one.
        """

        def work(pool: Pool) -> tuple[float, float, float]:
            operation(pool.take(n_arrays, name))
            self._barrier.wait(_TIMEOUT_S)
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            for _ in range(n_calls):
                operation(pool.take(n_arrays, name))
            return begin, time.perf_counter(), time.thread_time() - begin_cpu

        found = list(self._threads.map(work, self._pools))
        begins, ends, cpus = zip(*found)
        return Turn((max(ends) - min(begins)) / n_calls, sum(cpus) / n_calls / self.n_threads)


def n_usable() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))
