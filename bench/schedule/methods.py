"""The contestants of `bench schedule`: jobs that train the same network on the same machines."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bpsfast.bench.harness.contestant_group import Group
from bpsfast.bench.harness.launcher import SLOW_CONTROL_PLANE, ContestantLauncher
from bpsfast.orchestration.placement.shares import Machine, least_time_s
from bpsfast.tools.planner import catalog
from bpsfast.tools.simulator.workload import Workload, build, workload

#: Small compared with the network, as partitions are with a whole model; enough in flight that no connection waits.
PARTITION_NBYTES, CREDIT_NBYTES = 32 << 10, 64 << 10
#: More than any network here, so that everything is sent at once.
NO_CREDIT_NBYTES = 1 << 30
#: A ring's steps are n times smaller than its tensors, and each waits for the slowest machine.
GLOO_PARTITION_NBYTES, GLOO_CREDIT_NBYTES = 256 << 10, 1 << 20


@dataclass(frozen=True)
class Method:
    """One contestant. `trainer`: argument of `trainer.Trainer`; `priority`, `crosses`: arguments of the simulator.

    `credit_nbytes`: for ours, the bytes in flight to a machine.
    """

    trainer: str
    priority: bool = False
    crosses: bool = False
    is_gloo: bool = False
    is_quick: bool = False
    credit_nbytes: int = CREDIT_NBYTES


METHODS = {
    "fifo": Method("barrier", is_quick=True),
    "fifo, no credit": Method("barrier", credit_nbytes=NO_CREDIT_NBYTES),
    "fifo, crossing": Method("crossing", crosses=True),
    "priority": Method("barrier", priority=True),
    "priority, crossing": Method("crossing", priority=True, crosses=True, is_quick=True),
    "DDP gloo": Method("ddp", is_gloo=True, is_quick=True),
    "gloo fifo, crossing": Method("gloo fifo", crosses=True, is_gloo=True),
    "gloo priority, crossing": Method("gloo priority", priority=True, crosses=True, is_gloo=True),
}


def divided(model: str, divisor: int, compute_s: float) -> Workload:
    """Return the layers of a built-in model with their shares of *compute_s* and tensors *divisor* times smaller."""
    whole = build(model, compute_s)
    return workload(f"{model}/{divisor}", whole.layers, catalog.divided(model, divisor))


@dataclass(frozen=True)
class Setup:
    """The machines and their model. `ratio`: seconds of computing for each second of optimal communication.

    `compute_s` is 0 until the rate of the links is known (`computing`).
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
        """Return the machines' names, which are those of a job's shape."""
        return [*(f"node{i}" for i in range(self.n_workers)), *(f"helper{i}" for i in range(self.n_helpers))]

    @property
    def job(self) -> Workload:
        """Return the workload."""
        return divided(self.model, self.divisor, self.compute_s)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all gradients of a machine."""
        return self.job.nbytes

    def computing(self, rate_bytes: float) -> Setup:
        """Return a copy whose compute time is `ratio` times the optimal communication on links of *rate_bytes*."""
        machines = [Machine(True, rate_bytes)] * self.n_workers + [Machine(False, rate_bytes)] * self.n_helpers
        return replace(self, compute_s=self.ratio * least_time_s(machines, self.nbytes))


def start(launcher: ContestantLauncher, name: str, setup: Setup) -> Group:
    """Start contestant *name*."""
    method = METHODS[name]
    options: dict[str, Any] = {"method": method.trainer, "model": setup.model, "divisor": setup.divisor,
                               "compute_s": setup.compute_s}
    if method.trainer.startswith("gloo"):
        options |= {"partition_nbytes": GLOO_PARTITION_NBYTES, "credit_nbytes": GLOO_CREDIT_NBYTES}
    if method.is_gloo:
        return launcher.gloo(trainer=options)
    return launcher.bpsfast(trainer=options, n_helpers=setup.n_helpers, transport="tcp",
                            scheduling="priority" if method.priority else "fifo", partition_bytes=PARTITION_NBYTES,
                            credit_bytes=method.credit_nbytes, **SLOW_CONTROL_PLANE)
