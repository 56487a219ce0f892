"""The machines of a simulation: how many, how fast their network cards, what a message costs them."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...orchestration.errors import ConfigError
from ...orchestration.placement.shares import Machine

#: More than this is a typing error, or needs a coarser model than messages.
MAX_MACHINES = 65536


class Costs(NamedTuple):
    """What machines and messages cost besides bytes on a wire. Rates are in bytes/s, `inf` costs nothing.

    overhead_s
        Occupies a direction of a network card once a message, at both ends.
    latency_s
        Between two machines, in the wire and the switch: occupies nobody.
    sum_rate
        Bytes of inputs that an owner sums in a second.
    fused_sum
        Sum a partition in one pass when all inputs are there, as our engine does; else each input as it arrives, as
        BytePS does.
    reduce_rate, broadcast_rate
        Bytes of one gradient that a machine reduces over its accelerators, or hands back to them, in a second; a stage
        of the pipeline, one partition at a time, most urgent first. For BytePS's layouts see `intra_machine`.
    queued_answers
        That bytes have arrived the sender hears by what waits behind the other direction's bytes at both cards, as
        TCP's acknowledgements do where a card has one queue; else after `latency_s`.
    burst_nbytes
        How much a direction of a card that was idle may send at once, as where a shaper (tbf) is the limit.
    """

    overhead_s: float = 0.0
    latency_s: float = 0.0
    sum_rate: float = math.inf
    fused_sum: bool = True
    reduce_rate: float = math.inf
    broadcast_rate: float = math.inf
    queued_answers: bool = False
    burst_nbytes: float = 0.0


#: Nothing costs anything but bytes on a wire.
FREE = Costs()


class Cluster(NamedTuple):
    """Machines in node order, those with ranks first; `rate` of each in bytes/s, one direction of a duplex card."""

    machines: tuple[Machine, ...]
    costs: Costs = FREE

    @property
    def n_workers(self) -> int:
        """Count the machines with ranks."""
        return sum(machine.has_ranks for machine in self.machines)

    @property
    def n_helpers(self) -> int:
        """Count the machines that only sum."""
        return len(self.machines) - self.n_workers

    @property
    def is_uniform(self) -> bool:
        """Tell whether all workers have one rate, and all helpers one."""
        return len({*self.machines}) <= (2 if self.n_helpers else 1)


def cluster(worker_rates: Sequence[float], helper_rates: Sequence[float] = (), costs: Costs = FREE) -> Cluster:
    """Return a checked cluster; rates in bytes/s.

    Raises
    ------
    ConfigError
        If there is no worker, are too many machines, or a rate or cost is no positive number.
    """
    if not worker_rates:
        raise ConfigError("a cluster needs at least one machine with ranks, got none")
    n = len(worker_rates) + len(helper_rates)
    if n > MAX_MACHINES:
        raise ConfigError(f"a cluster of {n} machines is not simulated; at most {MAX_MACHINES} are")
    for role, rates in (("worker", worker_rates), ("helper", helper_rates)):
        for i, rate in enumerate(rates):
            if not (rate > 0 and math.isfinite(rate)):
                raise ConfigError(f"{role} {i} has a NIC of {rate} bytes/s; a rate must be above zero and finite")
    for name, unit in (("overhead_s", "seconds"), ("latency_s", "seconds"), ("burst_nbytes", "bytes")):
        value = getattr(costs, name)
        if not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{name} is {value}; it must be zero or more {unit}")
    for name in ("sum_rate", "reduce_rate", "broadcast_rate"):
        value = getattr(costs, name)
        if not value > 0:
            raise ConfigError(f"{name} is {value} bytes/s; it must be above zero (inf: costs nothing)")
    machines = (*(Machine(True, float(rate)) for rate in worker_rates),
                *(Machine(False, float(rate)) for rate in helper_rates))
    return Cluster(machines, costs)


def uniform(n_workers: int, n_helpers: int, rate: float, costs: Costs = FREE) -> Cluster:
    """Return a cluster of *n_workers* and *n_helpers* with equal cards of *rate* bytes/s."""
    if n_workers < 1 or n_helpers < 0:
        raise ConfigError(f"a cluster needs one worker or more and no negative number of helpers, got {n_workers} and "
                          f"{n_helpers}")
    if n_workers + n_helpers > MAX_MACHINES:
        raise ConfigError(f"a cluster of {n_workers + n_helpers} machines is not simulated; at most {MAX_MACHINES} are")
    return cluster([rate] * n_workers, [rate] * n_helpers, costs)
