"""The operations of a server on gradients: sums by our kernels, optimizers' updates, and a copy as the bound."""
from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from bpsfast import kernels
from bpsfast.bench.harness.cold_memory import PARTITION_NBYTES, Array
from bpsfast.bench.paper.summation import updates
from bpsfast.bench.paper.summation.thread_team import Operation

COPY, IN_PLACE, FUSED = "copy", "sum in place", "sum, fused"
SUM_DTYPES = ("float32", "float16", "bfloat16")


@dataclass
class Row:
    """One operation of one number of threads on partitions of `PARTITION_NBYTES`.

    Of the *n_arrays* that it touches *n_in* are gradients that came in; memory moves *n_streams* partitions for them.
    `samples_s` are seconds of one call of all threads at once, `cpu_s` CPU seconds of one call of one thread.
    """

    operation: str
    dtype: str
    n_threads: int
    n_arrays: int
    n_in: int
    n_streams: int
    samples_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def core_bits(self) -> float:
        """Bits per second of gradients that a core takes in, by its CPU time."""
        return 8 * self.n_in * PARTITION_NBYTES / statistics.median(self.cpu_s)

    @property
    def bits(self) -> float:
        """Bits per second of gradients that all threads took in."""
        return 8 * self.n_in * PARTITION_NBYTES * self.n_threads / statistics.median(self.samples_s)

    @property
    def traffic(self) -> float:
        """Bytes that go through memory for each byte of gradient that comes in."""
        return self.n_streams / self.n_in


def rows(n_workers: int, n_threads: int, dtypes: tuple[str, ...]) -> list[Row]:
    """Return what is to be measured, without samples: the copy first."""
    found = [Row(COPY, "float32", n_threads, 2, 1, 2)]
    for name in dtypes:
        found.append(Row(IN_PLACE, name, n_threads, 2, 1, 3))
        found.append(Row(FUSED, name, n_threads, n_workers + 1, n_workers, n_workers + 1))
    found += [Row(name, "float32", n_threads, update.n_arrays, 1, update.n_streams)
              for name, update in updates.UPDATES.items()]
    return found


def call_of(row: Row) -> Operation:
    """Return what one thread calls, with the partitions as a list."""
    if row.operation == IN_PLACE:
        return lambda v: kernels.add_into(v[0], v[1])
    if row.operation in (COPY, FUSED):  # all as inputs of other nodes: one after the other, no sum of their own

        def fused(v: list[Array]) -> None:
            kernels.fused_sum(v[0], v[1:], (), (), nontemporal=True)

        return fused
    update = updates.compiled(row.operation)
    return lambda v: update(*v)
