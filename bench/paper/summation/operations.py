"""The operations of `bench summation` on gradients: sums by our kernels, optimizers' updates, a copy as the bound."""
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
    """One operation with one number of threads on partitions of `PARTITION_NBYTES`.

    It uses `n_arrays`, of which `n_in` are incoming gradients; memory moves `n_streams` partitions for them.
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
        """Return the bits of gradients that a core processes in a second of CPU time."""
        return 8 * self.n_in * PARTITION_NBYTES / statistics.median(self.cpu_s)

    @property
    def bits(self) -> float:
        """Return the bits per second of gradients that all threads process."""
        return 8 * self.n_in * PARTITION_NBYTES * self.n_threads / statistics.median(self.samples_s)

    @property
    def traffic(self) -> float:
        """Return the bytes of memory traffic for each incoming byte of gradients."""
        return self.n_streams / self.n_in


def rows(n_workers: int, n_threads: int, dtypes: tuple[str, ...]) -> list[Row]:
    """Return the rows to measure, without samples; the copy is the first."""
    found = [Row(COPY, "float32", n_threads, 2, 1, 2)]
    for name in dtypes:
        found.append(Row(IN_PLACE, name, n_threads, 2, 1, 3))
        found.append(Row(FUSED, name, n_threads, n_workers + 1, n_workers, n_workers + 1))
    found += [Row(name, "float32", n_threads, update.n_arrays, 1, update.n_streams)
              for name, update in updates.UPDATES.items()]
    return found


def call_of(row: Row) -> Operation:
    """Return the function that one thread calls with a list of partitions."""
    if row.operation == IN_PLACE:
        return lambda v: kernels.add_into(v[0], v[1])
    if row.operation in (COPY, FUSED):  # all are inputs from other nodes, added one after another

        def fused(v: list[Array]) -> None:
            kernels.fused_sum(v[0], v[1:], (), (), nontemporal=True)

        return fused
    update = updates.compiled(row.operation)
    return lambda v: update(*v)
