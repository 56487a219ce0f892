"""The report of `bench schedule`: measurements beside the simulator's times for the same layers, links and settings."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bpsfast.base.settings import Settings
from bpsfast.bench.harness import table
from bpsfast.bench.harness.samples import Row
from bpsfast.bench.paper.optimum.measurement import MOST_BUSY, busiest
from bpsfast.bench.schedule.methods import GLOO_CREDIT_NBYTES, GLOO_PARTITION_NBYTES, METHODS, PARTITION_NBYTES, Setup
from bpsfast.launch.namespaces import netns
from bpsfast.tools.simulator.all_reduce import Ring
from bpsfast.tools.simulator.network import Costs, uniform
from bpsfast.tools.simulator.simulation import Options, simulate
from bpsfast.tools.simulator.workload import Workload, tensor_nbytes

_DDP_BUCKET_NBYTES = 25 << 20
_N_SIMULATED = 8
#: Comparison -> the method and the one that it is compared with.
_GAINS = {"priority and crossing over fifo with a barrier": ("priority, crossing", "fifo"),
          "priority over fifo, both crossing": ("priority, crossing", "fifo, crossing"),
          "priority and crossing over DDP with gloo": ("priority, crossing", "DDP gloo"),
          "priority over fifo over gloo, both crossing": ("gloo priority, crossing", "gloo fifo, crossing")}


@dataclass(frozen=True)
class Found:
    """One run. `phases_s`: seconds of forward, backward and optimizer in a step `alone`; `digests`: method -> number of
    steps and hash of the weights of each rank."""

    setup: Setup
    rate_bytes: float
    alone: Row
    phases_s: tuple[float, float, float]
    rows: Sequence[Row]
    digests: Mapping[str, Sequence[tuple[int, str]]]


def simulated_s(found: Found, name: str) -> float:
    """Return the simulated time of a step."""
    method, setup = METHODS[name], found.setup
    job, optimizer_s = _as_it_ran(setup.job, found.phases_s, method.crosses)
    workers = uniform(setup.n_workers, 0, found.rate_bytes)
    if method.trainer.startswith("gloo"):
        options = Options(priority=method.priority, cross_barrier=method.crosses, optimizer_s=optimizer_s,
                          partition_nbytes=GLOO_PARTITION_NBYTES, credit_nbytes=GLOO_CREDIT_NBYTES)
        return simulate(job, workers, "all-reduce", options, _N_SIMULATED).step_s
    if method.is_gloo:
        ring = Ring(fusion_nbytes=_DDP_BUCKET_NBYTES // setup.divisor, cycle_s=0.0)
        options = Options(cross_barrier=False, ring=ring, optimizer_s=optimizer_s)
        return simulate(job, workers, "ring", options, _N_SIMULATED).step_s
    links = Costs(queued_answers=True, burst_nbytes=netns.burst_nbytes(setup.rate_bits))
    options = Options(priority=method.priority, cross_barrier=method.crosses, credit_nbytes=method.credit_nbytes,
                      partition_nbytes=PARTITION_NBYTES, fusion_nbytes=Settings().fusion_bytes,
                      optimizer_s=optimizer_s, fold=False)
    return simulate(job, uniform(setup.n_workers, setup.n_helpers, found.rate_bytes, links), "optimal", options,
                    _N_SIMULATED).step_s


def slowest(phases: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Return the longest time of each phase over all ranks."""
    forward_s, backward_s, optimizer_s = map(max, zip(*phases))
    return forward_s, backward_s, optimizer_s


def _as_it_ran(job: Workload, phases_s: tuple[float, float, float], crosses: bool) -> tuple[Workload, float]:
    """Return *job* with the measured overhead of its layers, and the optimizer's time after the last sum.

    Overheads are distributed over layers by bytes; without a barrier each layer also has its share of the optimizer,
    between its sums and its forward.
    """
    nbytes = [sum(tensor_nbytes(job.shapes[name], job.dtype) for name in layer.tensors) for layer in job.layers]
    forward_s, backward_s, optimizer_s = phases_s
    more_forward_s = max(0.0, forward_s - sum(layer.forward_s for layer in job.layers)) + optimizer_s * crosses
    more_backward_s = max(0.0, backward_s - sum(layer.backward_s for layer in job.layers))
    layers = [layer._replace(forward_s=layer.forward_s + more_forward_s * n / sum(nbytes),
                             backward_s=layer.backward_s + more_backward_s * n / sum(nbytes))
              for layer, n in zip(job.layers, nbytes)]
    return job._replace(layers=tuple(layers)), 0.0 if crosses else optimizer_s


def weights_agree(found: Found) -> str:
    """Return a sentence on whether weights agree bit for bit, on all ranks and between our methods."""
    for name, ranks in found.digests.items():
        if len({digest for _, digest in ranks}) > 1:
            return f"WEIGHTS DIFFER between the ranks of {name}"
    ours = {name: ranks[0] for name, ranks in found.digests.items() if not METHODS[name].is_gloo}
    if len(set(ours.values())) > 1:
        return f"WEIGHTS DIFFER between {', '.join(ours)}"
    steps = next(iter(ours.values()), (0, ""))[0]
    return f"after {steps} steps the weights of {', '.join(ours)} are the same, bit for bit" if len(ours) > 1 else ""


def text(found: Found) -> str:
    """Return the table and the gains."""
    setup, alone_s = found.setup, found.alone.median_s
    lines = [["way", "step s", "simulated", "dev. %", "exposed s", "simulated", "dev. %", "CPU %", ""]]
    steps = {row.name: row.median_s for row in found.rows}
    predicted = {row.name: simulated_s(found, row.name) for row in found.rows}
    for row in found.rows:
        exposed_s, sim_s = row.median_s - alone_s, predicted[row.name]
        lines.append([row.name, f"{row.median_s:.3f}", f"{sim_s:.3f}", _deviation(row.median_s, sim_s),
                      f"{exposed_s:.3f}", f"{sim_s - alone_s:.3f}", _deviation(exposed_s, sim_s - alone_s),
                      f"{100 * busiest([row]):.0f}", f"{row.n_wrong} WRONG" if row.n_wrong else ""])
        if busiest([row]) > MOST_BUSY:
            lines[-1][-1] += " VOID: the CPU was the limit"
    words = [f"# {setup.model}/{setup.divisor}, {setup.nbytes / 1e6:.1f} MB, on {setup.n_workers} workers and "
             f"{setup.n_helpers} helpers; links that move {found.rate_bytes * 8 / 1e6:.1f} Mbit/s of payload each way; "
             f"a step computes {alone_s:.3f} s", table.plain(lines)]
    for name, (of, over) in _GAINS.items():
        if of in steps and over in steps:
            words.append(f"# {name}: {steps[over] / steps[of]:.2f} times as fast (simulated "
                         f"{predicted[over] / predicted[of]:.2f})")
    return "\n".join([*words, f"# {weights_agree(found)}", ""])


def records(found: Found) -> list[dict[str, Any]]:
    """Return one record for each method for the result file; seconds and bytes."""
    setup = found.setup
    return [{
        "section": "schedule",
        "chosen": {"way": row.name, "model": setup.model, "divisor": setup.divisor, "nbytes": setup.nbytes,
                   "n_workers": setup.n_workers, "n_helpers": setup.n_helpers, "ratio": setup.ratio,
                   "rate_bits": setup.rate_bits, "compute_s": setup.compute_s},
        "measured": {"samples_s": row.samples_s, "median_s": row.median_s,
                     "alone_s": found.alone.median_s, "phases_s": found.phases_s,
                     "exposed_s": row.median_s - found.alone.median_s, "rate_bytes": found.rate_bytes,
                     "n_wrong": row.n_wrong, "cpu_busy": row.cpu_busy, "void": busiest([row]) > MOST_BUSY,
                     "digests": list(found.digests[row.name])},
        "simulated": {"step_s": simulated_s(found, row.name)},
    } for row in found.rows]


def _deviation(measured: float, said: float) -> str:
    return f"{100 * (measured / said - 1):+.1f}" if said else "-"
