"""The gain of each part of BytePS's design on 256 GPUs, simulated: each bar has one part more.

The cluster, the all-reduce and the cost of messages are those of figures 15 and 16 (`figures`), the inside of a machine
is that of figure 14 (`figure_14`): the first bars sum as NCCL does by default, with all GPUs as roots. There are half
as many helpers as machines with GPUs, as in `bench schedule`; this is between the two extremes of the figures.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bpsfast.hardware.topology.loads import Traffic
from bpsfast.orchestration.placement.shares import Machine, optimal_shares
from bpsfast.tools.simulator.all_reduce import Ring
from bpsfast.tools.simulator.network import Costs, cluster
from bpsfast.tools.simulator.simulation import Options, simulate

from . import machines, osdi20
from .figure_14 import nvlink_way
from .figures import Constants, run, workload_of
from .intra_machine import IntraMachine, inside

N, K = 32, 16
MODELS = tuple(each.model for each in osdi20.JOBS)
_ALL_ROOTS, _BEST_ROOTS = tuple(range(osdi20.GPUS)), (2, 3)
#: More bytes than any model has: everything is sent at once.
_NO_CREDIT_NBYTES = 1 << 40


class Part(NamedTuple):
    """One bar: the parts of the design that it has in addition to an all-reduce. `roots`: GPUs that copy to memory."""

    name: str
    is_split: bool = True
    priority: bool = False
    crosses: bool = False
    roots: tuple[int, ...] = _ALL_ROOTS


PARTS = (
    Part("all-reduce, FIFO", is_split=False),
    Part("+ optimal split"),
    Part("+ priority and credit", priority=True),
    Part("+ cross-barrier", priority=True, crosses=True),
    Part("+ topology", priority=True, crosses=True, roots=_BEST_ROOTS),
)


class Bar(NamedTuple):
    """A simulated step of `model`; `linear_s` is the step without communication."""

    model: str
    part: str
    step_s: float
    linear_s: float

    @property
    def efficiency(self) -> float:
        """Return the speed as a fraction of linear scaling."""
        return self.linear_s / self.step_s


def traffic(n: int, k: int) -> Traffic:
    """Return the traffic on the card of one of *n* training machines with *k* helpers, at the optimum."""
    owned = optimal_shares([Machine(True, 1.0)] * n + [Machine(False, 1.0)] * k, 1.0).owned[0]
    return Traffic(service=(n - 2) * owned)


def insides(constants: Constants) -> dict[tuple[int, ...], IntraMachine]:
    """Return the rates of a machine for each choice of roots in `PARTS`."""
    topology, each = machines.nvlink(), traffic(N, K)
    ring = Ring(overhead_s=constants.ring_overhead_s)
    return {roots: inside(topology, nvlink_way(topology, roots, each), each, ring, Options().partition_nbytes)
            for roots in (_ALL_ROOTS, _BEST_ROOTS)}


def bars(constants: Constants, models: Sequence[str] = MODELS) -> list[Bar]:
    """Return all bars of *models*, which are names in `osdi20.JOBS`."""
    found: list[Bar] = []
    ways = insides(constants)
    for name in models:
        job = workload_of(name)
        framework = next(each.framework for each in osdi20.JOBS if each.model == name)
        per_byte_s = constants.of(framework) * job.nbytes if framework == "PyTorch" else 0.0
        for part in PARTS:
            if not part.is_split:
                step_s = run("all-reduce", job, N, 0, constants, framework=framework).step_s
            else:
                way = ways[part.roots]
                costs = Costs(sum_rate=osdi20.SUM_RATE, fused_sum=False, reduce_rate=way.stage_rate,
                              broadcast_rate=way.stage_rate, overhead_s=constants.message_overhead_s)
                options = Options(priority=part.priority, cross_barrier=part.crosses, interleave=True,
                                  optimizer_s=per_byte_s,
                                  credit_nbytes=Options().credit_nbytes if part.priority else _NO_CREDIT_NBYTES)
                # helpers have no GPUs that copy
                together = cluster([way.card_rate] * N, [osdi20.CARD_RATE] * K, costs)
                step_s = simulate(job, together, "optimal", options).step_s
            found.append(Bar(name, part.name, step_s, job.compute_s))
    return found
