"""All-reduces by urgency, as `bpsfast.torch.schedule` drives gloo or NCCL: begun in rank 0's order, within its credit.

What begins next is said by the job's own `Leader`. All ranks compute alike here, so what rank 0 has been given all have
been given, and one worker stands for all. Partitions pass through the ring one after another, each for as long as its
bytes and overheads take (`ring.reduce_s`); the latencies of its lock-steps, and of rank 0's word, occupy nobody, so
credit for several partitions fills the ring in the meantime. Source: ByteScheduler (SOSP'19) section 4.
"""
from __future__ import annotations

from collections.abc import Callable

from ...orchestration.priority.turns import Entry, Leader
from .cluster import Cluster
from .event_clock import Clock
from .ring import Ring, reduce_s, wire_nbytes
from .workload import PartitionedWorkload


class ScheduledAllReduce:
    """The all-reduces of one representative worker.

    Parameters
    ----------
    ring
        Its fusion buffers and cycles are not used: partitions are what begins, as soon as there is credit.
    credit_nbytes
        Bytes of partitions that are under way at a time.
    priority
        Begin what the next forward needs first; else what was there first.
    done
        Called with (worker, unit) when a unit's sum is there, as by `SimulatedPushPull`.
    """

    def __init__(self, clock: Clock, cluster: Cluster, ring: Ring, plan: PartitionedWorkload, *, credit_nbytes: int, priority: bool,
                 done: Callable[[int, int], None]) -> None:
        self._clock = clock
        self._cluster = cluster
        self._at_once = cluster._replace(costs=cluster.costs._replace(latency_s=0.0))
        n_lock_steps = 2 * (cluster.n_workers * ring.ranks_per_machine - 1)
        self._latency_s = 0.0 if cluster.n_workers == 1 else (n_lock_steps + 1) * cluster.costs.latency_s
        self._ring = ring
        self._units = plan.units
        self._unit_of = {unit.name: unit.unit for unit in plan.units}
        self._left = [len(unit.parts) for unit in plan.units]
        self._priority = priority
        self._done = done
        self._leader = Leader(credit_nbytes)
        self._ring_free_s = 0.0
        self.wire_nbytes = 0.0

    def gradient_ready(self, worker: int, unit: int) -> None:
        """Take the gradients of *unit*."""
        given = self._units[unit]
        for index, part in enumerate(given.parts):
            self._leader.give(Entry(given.name, index, part.nbytes, given.dtype),
                              given.priority if self._priority else 0)
        self._begin()

    def _begin(self) -> None:
        for entry in self._leader.turns():
            busy_s = reduce_s(entry.nbytes, self._at_once, self._ring)
            self._ring_free_s = max(self._clock.now, self._ring_free_s) + busy_s
            self.wire_nbytes += wire_nbytes(entry.nbytes, self._cluster, self._ring)
            self._clock.at(self._ring_free_s + self._latency_s, self._reduced, entry)

    def _reduced(self, entry: Entry) -> None:
        self._leader.done(entry)
        self._begin()
        unit = self._unit_of[entry.name]
        self._left[unit] -= 1
        if not self._left[unit]:
            self._left[unit] = len(self._units[unit].parts)
            self._done(0, unit)
