"""Simulated all-reduces: a ring with fusion buffers, as Horovod drives NCCL, and all-reduces in order of priority.

All-reduces in order of priority follow `bpsfast.torch.schedule`, which drives gloo or NCCL (ByteScheduler, SOSP'19
section 4): the job's own `Leader` decides what starts next, in rank 0's order and within its credit. All ranks compute
alike, so one worker stands for all. Partitions pass through the ring one after another, each for as long as its bytes
and overheads take (`reduce_s`); latencies occupy nothing, so credit for several partitions fills the ring.
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...orchestration.errors import ConfigError
from ...orchestration.priority.turns import Entry, Leader
from .network import Clock, Cluster
from .workload import PartitionedWorkload


class Ring(NamedTuple):
    """Parameters of a ring with `ranks_per_machine` members on each machine.

    Each slice of `slice_nbytes` costs `overhead_s` besides its bytes. A fusion buffer of `fusion_nbytes` (0: one tensor
    at a time) is filled every `cycle_s` seconds. `inside_rate`: bytes/s of the slowest link inside a machine.
    """

    ranks_per_machine: int = 1
    slice_nbytes: int = 524_288
    overhead_s: float = 0.0
    fusion_nbytes: int = 67_108_864
    cycle_s: float = 0.005
    inside_rate: float = math.inf


def check_ring(ring: Ring) -> None:
    """Raise `ConfigError` if a parameter of *ring* is invalid."""
    if ring.ranks_per_machine < 1:
        raise ConfigError(f"a ring needs one rank or more on each machine, got {ring.ranks_per_machine}")
    if ring.slice_nbytes < 1:
        raise ConfigError(f"a ring's slices must have one byte or more, got {ring.slice_nbytes}")
    for name in ("overhead_s", "fusion_nbytes", "cycle_s"):
        if not getattr(ring, name) >= 0:
            raise ConfigError(f"a ring's {name} must not be negative, got {getattr(ring, name)}")
    if not ring.inside_rate > 0:
        raise ConfigError(f"a ring's inside_rate must be above zero bytes/s, got {ring.inside_rate}")


def reduce_s(nbytes: float, cluster: Cluster, ring: Ring) -> float:
    """Return the time that the ring takes for *nbytes*."""
    n_ranks = cluster.n_workers * ring.ranks_per_machine
    if n_ranks == 1 or not nbytes:
        return 0.0
    step_nbytes = nbytes / n_ranks
    rates = [machine.rate for machine in cluster.machines if machine.has_ranks]
    rate = ring.inside_rate if len(rates) == 1 else min(*rates, ring.inside_rate)
    latency_s = 0.0 if len(rates) == 1 else cluster.costs.latency_s
    slices = math.ceil(step_nbytes / ring.slice_nbytes)
    return 2 * (n_ranks - 1) * (slices * ring.overhead_s + latency_s + step_nbytes / rate)


def wire_nbytes(nbytes: float, cluster: Cluster, ring: Ring) -> float:
    """Return the bytes that each machine's card sends, and receives, for *nbytes*."""
    n_ranks = cluster.n_workers * ring.ranks_per_machine
    return 0.0 if cluster.n_workers == 1 else 2 * (n_ranks - 1) * nbytes / n_ranks


class RingAllReduce:
    """The all-reduce of one worker, which stands for all: they run in lock-step. Calls *done* with (worker, unit)."""

    def __init__(self, clock: Clock, cluster: Cluster, ring: Ring, nbytes_of_unit: Sequence[int],
                 done: Callable[[int, int], None]) -> None:
        self._clock, self._cluster, self._ring = clock, cluster, ring
        self._nbytes_of_unit, self._done = nbytes_of_unit, done
        self._ready: deque[int] = deque()
        self._busy = self._awake = False
        self.wire_nbytes = 0.0

    def gradient_ready(self, worker: int, unit: int) -> None:
        """Accept the gradients of *unit* for the next cycle."""
        self._ready.append(unit)
        self._sleep()

    def _sleep(self) -> None:
        if self._awake or self._busy:
            return
        self._awake = True
        cycle_s, now = self._ring.cycle_s, self._clock.now
        # cycles tick from time 0; a cycle that ticks now has already looked
        self._clock.at(max(now, (math.floor(now / cycle_s) + 1) * cycle_s) if cycle_s else now, self._cycle)

    def _cycle(self) -> None:
        self._awake = False
        fused: list[int] = []
        nbytes = 0
        while self._ready:
            more = self._nbytes_of_unit[self._ready[0]]
            if fused and nbytes + more > self._ring.fusion_nbytes:
                break
            fused.append(self._ready.popleft())
            nbytes += more
        self._busy = True
        self.wire_nbytes += wire_nbytes(nbytes, self._cluster, self._ring)
        self._clock.at(self._clock.now + reduce_s(nbytes, self._cluster, self._ring), self._reduced, fused)

    def _reduced(self, fused: list[int]) -> None:
        self._busy = False
        for unit in fused:
            self._done(0, unit)
        if self._ready and not self._busy:
            self._sleep()


class ScheduledAllReduce:
    """All-reduces in order of priority, of one representative worker.

    The fusion buffers and cycles of *ring* are not used: partitions start as soon as there is credit, of at most
    *credit_nbytes* bytes in flight. *priority*: start what the next forward pass needs first; else in order of arrival.
    *done* is called with (worker, unit) when a unit's sum is there, as by `SimulatedPushPull`.
    """

    def __init__(self, clock: Clock, cluster: Cluster, ring: Ring, plan: PartitionedWorkload, *, credit_nbytes: int,
                 priority: bool, done: Callable[[int, int], None]) -> None:
        self._clock, self._cluster, self._ring = clock, cluster, ring
        self._at_once = cluster._replace(costs=cluster.costs._replace(latency_s=0.0))
        n_lock_steps = 2 * (cluster.n_workers * ring.ranks_per_machine - 1)
        self._latency_s = 0.0 if cluster.n_workers == 1 else (n_lock_steps + 1) * cluster.costs.latency_s
        self._units, self._priority, self._done = plan.units, priority, done
        self._unit_of = {unit.name: unit.unit for unit in plan.units}
        self._left = [len(unit.parts) for unit in plan.units]
        self._leader = Leader(credit_nbytes)
        self._ring_free_s = self.wire_nbytes = 0.0

    def gradient_ready(self, worker: int, unit: int) -> None:
        """Accept the gradients of *unit*."""
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
