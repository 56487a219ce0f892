"""The contestants of `bench schedule`: one job each, of the same network on the same machines."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bpsfast.bench.harness.contestant_group import Group
from bpsfast.bench.harness.launcher import SLOW_CONTROL_PLANE, ContestantLauncher
from bpsfast.orchestration.placement.shares import Machine, least_time_s
from bpsfast.tools.planner import catalog
from bpsfast.tools.simulator.workload import Workload, build, workload

#: Small beside the network, as partitions are beside a whole model; enough under way that no connection waits.
PARTITION_NBYTES, CREDIT_NBYTES = 32 << 10, 64 << 10
#: More than any network here: whatever is there is sent at once.
NO_CREDIT_NBYTES = 1 << 30
#: A ring's steps are n times smaller than what is reduced, and each waits for the slowest machine.
GLOO_PARTITION_NBYTES, GLOO_CREDIT_NBYTES = 256 << 10, 1 << 20


@dataclass(frozen=True)
class Way:
    """One contestant. `trainer`: the way of `training.trainer.Trainer`; `priority`, `crosses`: for the simulator.

    `credit_nbytes`: of one of ours, what may be under way to a machine.
    """

    trainer: str
    priority: bool = False
    crosses: bool = False
    is_gloo: bool = False
    is_quick: bool = False
    credit_nbytes: int = CREDIT_NBYTES


WAYS = {
    "fifo": Way("barrier", is_quick=True),
    "fifo, no credit": Way("barrier", credit_nbytes=NO_CREDIT_NBYTES),
    "fifo, crossing": Way("crossing", crosses=True),
    "priority": Way("barrier", priority=True),
    "priority, crossing": Way("crossing", priority=True, crosses=True, is_quick=True),
    "DDP gloo": Way("ddp", is_gloo=True, is_quick=True),
    "gloo fifo, crossing": Way("gloo fifo", crosses=True, is_gloo=True),
    "gloo priority, crossing": Way("gloo priority", priority=True, crosses=True, is_gloo=True),
}


def divided(model: str, divisor: int, compute_s: float) -> Workload:
    """Return a built-in model's layers with their share of *compute_s*, each tensor *divisor* times smaller."""
    whole = build(model, compute_s)
    return workload(f"{model}/{divisor}", whole.layers, catalog.divided(model, divisor))


@dataclass(frozen=True)
class Setup:
    """The machines and what they train. `ratio`: seconds of computing for each second that the optimum communicates.

    `compute_s` is 0 until it is known what the links move (`computing`).
    """

    n_workers: int
    n_helpers: int
    model: str
    divisor: int
    ratio: float
    rate_bits: float
    compute_s: float = 0.0

    @property
    def machines(self) -> list[str]:
        """Names, as a job's shape has them."""
        return [*(f"node{i}" for i in range(self.n_workers)), *(f"helper{i}" for i in range(self.n_helpers))]

    @property
    def job(self) -> Workload:
        """What is trained."""
        return divided(self.model, self.divisor, self.compute_s)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients of a machine."""
        return self.job.nbytes

    def computing(self, rate_bytes: float) -> Setup:
        """Return it with a computing time that is `ratio` of the optimum's on links of *rate_bytes*."""
        machines = [Machine(True, rate_bytes)] * self.n_workers + [Machine(False, rate_bytes)] * self.n_helpers
        return replace(self, compute_s=self.ratio * least_time_s(machines, self.nbytes))


def start(launcher: ContestantLauncher, name: str, setup: Setup) -> Group:
    """Start contestant *name*."""
    way = WAYS[name]
    options: dict[str, Any] = {"way": way.trainer, "model": setup.model, "divisor": setup.divisor,
                               "compute_s": setup.compute_s}
    if way.trainer.startswith("gloo"):
        options |= {"partition_nbytes": GLOO_PARTITION_NBYTES, "credit_nbytes": GLOO_CREDIT_NBYTES}
    if way.is_gloo:
        return launcher.gloo(trainer=options)
    return launcher.bpsfast(trainer=options, n_helpers=setup.n_helpers, transport="tcp",
                            scheduling="priority" if way.priority else "fifo", partition_bytes=PARTITION_NBYTES,
                            credit_bytes=way.credit_nbytes, **SLOW_CONTROL_PLANE)
