"""The figures of the BytePS paper, simulated: one table each, with the measured value of every cell.

The systems follow their documentation, with as few constants as possible (`Constants`): Horovod's ring over all GPUs,
without priorities; BytePS with priorities; the native parameter server, first come first served. TensorFlow and PyTorch
end a step with a barrier; in MXNet a layer's forward waits only for its own weights.

Two choices were made with knowledge of figures 15 and 16, and are not calibrated numbers. The ring begins after the
backward pass, as if its kernels kept the GPUs busy: BERT-large's step shows 172 to 230 ms of it, and the whole ring
takes 194. The kind of a framework's overhead (`OVERHEADS`) follows from how its parameter server slows down with
machines.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from bpsfast.tools.simulator.all_reduce import Ring
from bpsfast.tools.simulator.network import Costs, uniform
from bpsfast.tools.simulator.simulation import Options, Outcome, simulate
from bpsfast.tools.simulator.workload import Workload, build, one_bulk

from . import osdi20 as paper

#: Bytes of the microbenchmark of figure 12, which the paper does not state.
BULK_NBYTES = 2_048_000_000


class Constants(NamedTuple):
    """The calibrated constants (`calibration`), in seconds or bytes/s: three of the network, one for each framework.

    ring_overhead_s
        Overhead of a slice of NCCL's ring (figure 12).
    message_overhead_s
        Overhead of a message of BytePS (figure 12).
    server_rate
        Bytes/s of inputs that a native parameter server without optimizer sums (figure 12).
    framework
        Overhead of each framework (figures 15 and 16 at 256 GPUs), s, of the kind in `OVERHEADS`.
    """

    ring_overhead_s: float = 0.0
    message_overhead_s: float = 0.0
    server_rate: float = math.inf
    framework: tuple[tuple[str, float], ...] = ()

    def of(self, framework: str) -> float:
        """Return the calibrated overhead of *framework*; 0 if it has none."""
        return dict(self.framework).get(framework, 0.0)


#: Framework -> kind of its overhead, and unit. For frameworks with a parameter server it is the server's time for each
#: machine in a step, one after another. PyTorch has no server: it is the time to hand over a byte of gradients.
OVERHEADS = {"TensorFlow": "s/machine in its native PS", "MXNet": "s/machine in its native PS",
             "PyTorch": "s/byte of gradients in every system"}


class Row(NamedTuple):
    """One cell of a figure: the paper's and the simulated value, in `unit`."""

    figure: str
    of: str
    at: str
    paper: float
    simulated: float
    unit: str

    @property
    def error(self) -> float:
        """Return simulated minus paper."""
        return self.simulated - self.paper


def intra_machine(machine: str) -> Costs:
    """Return the cost of BytePS's layout of a machine (section 4.2): bytes of a gradient a second in each direction.

    PCIe only: reduce-scatter below a switch, then a copy to the host, so a GPU's link carries (2l-1)/l of all bytes, l
    = 4. NVLink: summed over NVLink, then copied once over a link that the network card does not use.
    """
    rate = paper.PCIE_RATE / (7 / 4) if machine == "PCIe" else paper.PCIE_RATE
    return Costs(sum_rate=paper.SUM_RATE, fused_sum=False, reduce_rate=rate, broadcast_rate=rate)


def run(system: str, job: Workload, n: int, k: int, constants: Constants, *, cross_barrier: bool = False,
        framework: str = "", machine: str = "NVLink", rate: float = paper.CARD_RATE, gpus: int = paper.GPUS,
        n_steps: int = 4) -> Outcome:
    """Simulate *job* under "all-reduce", "PS" or "BytePS" on *n* machines and *k* helpers."""
    overhead = constants.of(framework)
    per_byte_s = overhead * job.nbytes if framework == "PyTorch" else 0.0
    if system == "all-reduce":
        inside = paper.CROSS_SWITCH_RATE if machine == "PCIe" else math.inf
        ring = Ring(gpus, overhead_s=constants.ring_overhead_s, inside_rate=inside)
        return simulate(job, uniform(n, 0, rate), "ring", Options(
            cross_barrier=cross_barrier, overlap=False, ring=ring, optimizer_s=per_byte_s), n_steps)
    if system == "PS":
        costs = Costs(sum_rate=constants.server_rate, fused_sum=False)
        return simulate(job, uniform(n, k, rate, costs), "ps", Options(
            priority=False, cross_barrier=cross_barrier, optimizer_s=overhead * n), n_steps)
    costs = (intra_machine(machine) if gpus > 1 else Costs(sum_rate=paper.SUM_RATE, fused_sum=False))
    costs = costs._replace(overhead_s=constants.message_overhead_s)
    return simulate(job, uniform(n, k, rate, costs), "optimal", Options(
        priority=gpus > 1, cross_barrier=cross_barrier, interleave=True, optimizer_s=per_byte_s),
        n_steps)


def figure_12(constants: Constants) -> list[Row]:
    """Return the goodput of communication alone."""
    job = one_bulk(BULK_NBYTES)
    rows = []
    for system, measured in paper.FIGURE_12.items():
        for k, value in enumerate(measured):
            if system == "PS" and k == 0:
                continue  # there is no server
            found = run(system, job, 8, k, constants, gpus=1, n_steps=1)
            rows.append(Row("12", system, f"k={k}", value, BULK_NBYTES * 8 / 1e9 / found.step_s, "Gbit/s"))
    return rows


def figure_13(constants: Constants) -> list[Row]:
    """Return the speed of GPT-2 and U-GAT-IT relative to all-reduce on 8 machines, for each number of helpers."""
    rows = []
    for (machine, model), measured in paper.FIGURE_13.items():
        job = workload_of(model)
        usual = run("all-reduce", job, 8, 0, constants, framework="PyTorch", machine=machine).step_s
        for k, value in enumerate(measured):
            ours = run("BytePS", job, 8, k, constants, framework="PyTorch", machine=machine).step_s
            rows.append(Row("13", f"{machine} {model}", f"k={k}", value, usual / ours, "x"))
    return rows


def workload_of(model: str) -> Workload:
    """Return the model with the compute time of figures 15 and 16."""
    job = next(job for job in paper.JOBS if job.model == model)
    return build(job.model, job.compute_s, job.backward_share)


def figures_15_16(constants: Constants, scales: tuple[int, ...] = paper.SCALES,
                  systems: Callable[[str], bool] = lambda system: True) -> list[Row]:
    """Return the efficiency of six jobs on 32 to 256 GPUs."""
    rows = []
    for job in paper.JOBS:
        model = workload_of(job.model)
        for system, measured in job.efficiency.items():
            if not systems(system):
                continue
            for n, value in zip(paper.SCALES, measured):
                if n not in scales:
                    continue
                k = n if system in ("PS", "BytePS k=n") else 0
                found = run(system.split()[0], model, n, k, constants, framework=job.framework,
                            cross_barrier=job.framework == "MXNet")
                rows.append(Row("15/16", f"{job.model} {system}", f"{n * paper.GPUS} GPUs", value, found.efficiency,
                                "efficiency"))
    return rows

