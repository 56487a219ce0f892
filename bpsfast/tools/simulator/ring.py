"""Ring all-reduce behind fusion buffers, as Horovod drives NCCL: the usual system, for comparison.

A ring of r ranks reduces b bytes in 2(r-1) lock-steps of b/r bytes each. A step's bytes travel as slices, each of which
costs an overhead; the slowest card of the ring sets the pace. NCCL's ring visits every accelerator of a machine before
it leaves it, so r counts ranks, and each machine's card carries 2(r-1)/r of all bytes whatever the number of machines.

Horovod looks every `cycle_s` which tensors all ranks have, packs those that are there into a buffer, in the order they
came, and reduces one buffer after the other. Source: Sergeev and Del Balso, arXiv:1802.05799; NCCL 2.4's buffers (4 MiB
in 8 slices of 512 KiB).
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...orchestration.errors import ConfigError
from .cluster import Cluster
from .event_clock import Clock


class Ring(NamedTuple):
    """How the ring works.

    ranks_per_machine
        Members of the ring on each machine.
    slice_nbytes, overhead_s
        Each slice of a step costs *overhead_s* besides its bytes.
    fusion_nbytes, cycle_s
        Size of a fusion buffer (0: one tensor at a time) and how often it is filled.
    inside_rate
        Bytes/s of the slowest link of the ring inside a machine.
    """

    ranks_per_machine: int = 1
    slice_nbytes: int = 524_288
    overhead_s: float = 0.0
    fusion_nbytes: int = 67_108_864
    cycle_s: float = 0.005
    inside_rate: float = math.inf


def check_ring(ring: Ring) -> None:
    """Raise ConfigError if a number of *ring* makes no sense."""
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
    """Return how long the ring needs for *nbytes*."""
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
    """The all-reduce of one representative worker: lock-steps leave no two of them at different places.

    *done* is called with (worker, unit), as by `SimulatedPushPull`.
    """

    def __init__(self, clock: Clock, cluster: Cluster, ring: Ring, nbytes_of_unit: Sequence[int],
                 done: Callable[[int, int], None]) -> None:
        self._clock = clock
        self._cluster = cluster
        self._ring = ring
        self._nbytes_of_unit = nbytes_of_unit
        self._done = done
        self._ready: deque[int] = deque()
        self._busy = self._awake = False
        self.wire_nbytes = 0.0

    def gradient_ready(self, worker: int, unit: int) -> None:
        """Take the gradients of *unit*; they go with the next cycle."""
        self._ready.append(unit)
        self._sleep()

    def _sleep(self) -> None:
        if self._awake or self._busy:
            return
        self._awake = True
        cycle_s, now = self._ring.cycle_s, self._clock.now
        # cycles tick from the beginning of time; one that ticks now has looked already
        self._clock.at(max(now, (math.floor(now / cycle_s) + 1) * cycle_s) if cycle_s else now, self._cycle)

    def _cycle(self) -> None:
        self._awake = False
        self._reduce_next()

    def _reduce_next(self) -> None:
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
