"""Figure 14 of the BytePS paper, simulated: strategies inside a machine, relative to all-reduce, on 64 GPUs.

The cluster, the all-reduce and the cost of messages are those of the other figures (`figures`). Bars differ only inside
a machine: `intra_machine.inside` derives the rates from the loads of the strategy on the links of `machines`. In
addition to the calibrated constants one number for each model is fitted: the compute time of a step with which
all-reduce reaches figure 16's efficiency on these 64 GPUs. Nothing is fitted to figure 14.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bpsfast.hardware.topology.graph import PartKind, Topology
from bpsfast.hardware.topology.loads import Traffic
from bpsfast.hardware.topology.strategy_solver import Strategy, choose, islands_by_size, islands_of
from bpsfast.tools.simulator.all_reduce import Ring
from bpsfast.tools.simulator.network import Costs, uniform
from bpsfast.tools.simulator.simulation import Options, simulate
from bpsfast.tools.simulator.workload import Workload, build

from . import machines, osdi20
from .calibration import Fit
from .figures import Constants, Row, run, workload_of
from .intra_machine import IntraMachine, inside

#: Machines; without helpers, so each sums an eighth.
N = 8
TRAFFIC = Traffic(service=(N - 2) / N)
#: A simulated bar has the right size if it differs from the measured one by at most this fraction.
TOLERANCE = 0.10
#: Two bars that differ by less count as equal.
_EQUAL = 0.005


def pcie_way(topology: Topology, size: int) -> Strategy:
    """Return BytePS's strategy with BYTEPS_PCIE_SWITCH_SIZE: islands of *size* GPUs, all of which copy."""
    gpus = [part.name for part in topology.of(PartKind.GPU)]
    return choose(topology, TRAFFIC, [islands_by_size(topology, size)], gpus)


def nvlink_way(topology: Topology, roots: Sequence[int], traffic: Traffic = TRAFFIC) -> Strategy:
    """Return BytePS's strategy with BYTEPS_REDUCE_ROOTS; without that variable *roots* are all GPUs."""
    return choose(topology, traffic, [islands_of(topology, PartKind.NVSWITCH)], [f"gpu{root}" for root in roots])


class Bars(NamedTuple):
    """The bars of one kind of machines: name -> strategy."""

    topology: Callable[[], Topology]
    ways: dict[str, Callable[[Topology], Strategy]]


BARS = {
    "PCIe": Bars(machines.pcie_only, {
        "strawman": lambda topology: pcie_way(topology, 8),
        "CPU-assisted": lambda topology: pcie_way(topology, 4)}),
    "NVLink": Bars(machines.nvlink, {
        "root = all": lambda topology: nvlink_way(topology, range(8)),
        "root = 0": lambda topology: nvlink_way(topology, (0,)),
        "root = 2,3": lambda topology: nvlink_way(topology, (2, 3)),
        "root = 2": lambda topology: nvlink_way(topology, (2,))}),
}


def insides(constants: Constants) -> dict[tuple[str, str], IntraMachine]:
    """Return the rates of each machine with each strategy, by (machine, bar)."""
    ring = Ring(overhead_s=constants.ring_overhead_s)
    found = {}
    for machine, bars in BARS.items():
        topology = bars.topology()
        for name, way in bars.ways.items():
            found[machine, name] = inside(topology, way(topology), TRAFFIC, ring, Options().partition_nbytes)
    return found


def fitted(model: str, constants: Constants) -> tuple[Workload, Fit]:
    """Return *model* with the compute time that gives all-reduce figure 16's efficiency on 64 GPUs.

    It needs no search: the simulated all-reduce begins after the backward pass, so its wait does not depend on the
    compute time.
    """
    job = next(job for job in osdi20.JOBS if job.model == model)
    goal = job.efficiency["all-reduce"][osdi20.SCALES.index(N)]
    found = run("all-reduce", workload_of(model), N, 0, constants, framework="PyTorch")
    work = build(model, (found.step_s - found.compute_s) * goal / (1 - goal), job.backward_share)
    left = run("all-reduce", work, N, 0, constants, framework="PyTorch").efficiency - goal
    return work, Fit(f"{model} computing", work.compute_s, "s/step", "16 at 64 GPUs, all-reduce", 1, abs(left))


def figure_14(constants: Constants) -> tuple[list[Row], list[Fit]]:
    """Return the twelve bars, speeds relative to all-reduce, and the fits for them."""
    rows, fits = [], []
    works = {}
    for model in dict.fromkeys(model for _, model in osdi20.FIGURE_14):
        works[model], fit = fitted(model, constants)
        fits.append(fit)
    found = insides(constants)
    for (machine, model), measured in osdi20.FIGURE_14.items():
        usual = run("all-reduce", works[model], N, 0, constants, framework="PyTorch", machine=machine).step_s
        for name, value in measured.items():
            ours = _step_s(works[model], found[machine, name], constants)
            rows.append(Row("14", f"{machine} {model}", name, value, usual / ours, "x"))
    return rows, fits


def _step_s(work: Workload, way: IntraMachine, constants: Constants) -> float:
    costs = Costs(sum_rate=osdi20.SUM_RATE, fused_sum=False, reduce_rate=way.stage_rate, broadcast_rate=way.stage_rate,
                  overhead_s=constants.message_overhead_s)
    return simulate(work, uniform(N, 0, way.card_rate, costs), "optimal", Options(
        interleave=True, optimizer_s=constants.of("PyTorch") * work.nbytes)).step_s


def in_order(rows: Sequence[Row]) -> dict[tuple[str, str], bool]:
    """Return for each bar (of, at) whether its order with all others of its machine and model is as measured."""
    found = {}
    for row in rows:
        others = [(other.paper, other.simulated) for other in rows if other.of == row.of and other is not row]
        found[row.of, row.at] = all(
            _sign(row.paper - measured, 1e-9) == _sign(row.simulated / simulated - 1, _EQUAL)
            for measured, simulated in [*others, (1.0, 1.0)])
    return found


def pairs_in_order(rows: Sequence[Row]) -> tuple[int, int]:
    """Return how many pairs of bars of one machine and model are in the measured order, and the number of pairs."""
    pairs = [(one, other) for place, one in enumerate(rows) for other in rows[:place]]
    return sum(_sign(one.paper - other.paper, 1e-9) == _sign(one.simulated / other.simulated - 1, _EQUAL)
               for one, other in pairs), len(pairs)


def has_size(row: Row) -> bool:
    """Return whether a simulated bar is within `TOLERANCE` of the measured one."""
    return abs(row.error) <= TOLERANCE * row.paper


def _sign(difference: float, nothing: float) -> int:
    return 0 if abs(difference) <= nothing else 1 if difference > 0 else -1
