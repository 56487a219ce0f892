"""Other claims of the authors, simulated: BERT-large, TCP at 20 Gbit/s, links from 10 to 400 Gbit/s."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bpsfast.tools.simulator.network import uniform
from bpsfast.tools.simulator.simulation import Options, simulate
from bpsfast.tools.simulator.workload import MODELS, Workload, build

from . import osdi20
from .figures import Constants, Row, run, workload_of

#: Milliseconds of a step on one V100 at batch 32, and the share of backward (the authors' slides).
_SLIDES = {"resnet50": (96.0, 64 / 96), "vgg16": (149.0, 100 / 149)}
#: Machines, and helpers, for the TCP claim, which does not state them.
TCP_MACHINES = 4
SWEEP_GBITS = (10, 20, 25, 40, 50, 100, 200, 400)
SWEEP_MODELS = MODELS


def bert_large(constants: Constants) -> list[Row]:
    """Return BERT-large's speed per GPU on 32 and 256 GPUs, relative to all-reduce on 32."""
    model = workload_of("bert-large")
    usual = run("all-reduce", model, 4, 0, constants, framework="MXNet", cross_barrier=True).step_s
    rows = []
    for system, measured in osdi20.BERT_LARGE.items():
        for n, value in zip((4, 32), measured):
            found = run(system, model, n, n, constants, framework="MXNet", cross_barrier=True).step_s
            rows.append(Row("BERT-large", system, f"{n * osdi20.GPUS} GPUs", value, usual / found, "x"))
    return rows


def tcp_gains(constants: Constants) -> list[Row]:
    """Return the speed relative to all-reduce at 20 Gbit/s, batch 64."""
    rows = []
    for name, value in osdi20.TCP_GAINS.items():
        compute_ms, backward_share = _SLIDES[name]
        model = build(name, 2 * compute_ms / 1e3, backward_share)
        n, rate = TCP_MACHINES, 20e9 / 8
        usual, ours = (run(system, model, n, n, constants, framework="TensorFlow", rate=rate).step_s
                       for system in ("all-reduce", "BytePS"))
        rows.append(Row("20 Gbit/s TCP", name, f"{n * osdi20.GPUS} GPUs", value, usual / ours, "x"))
    return rows


class Point(NamedTuple):
    """One point of the sweep: the efficiency of three systems at one rate of the network cards."""

    model: str
    gbits: float
    all_reduce: float
    k0: float
    kn: float


def sweep(constants: Constants, models: Sequence[str] = SWEEP_MODELS, n: int = 8) -> list[Point]:
    """Return efficiencies on *n* machines of 8 V100 for each rate of the cards, of which 90 % is goodput."""
    points = []
    for model in models:
        job = next(job for job in osdi20.JOBS if job.model == model)
        work = workload_of(model)
        for gbits in SWEEP_GBITS:
            found = [run(system, work, n, k, constants, framework=job.framework,
                         cross_barrier=job.framework == "MXNet", rate=0.9e9 / 8 * gbits).efficiency
                     for system, k in (("all-reduce", 0), ("BytePS", 0), ("BytePS", n))]
            points.append(Point(model, gbits, *found))
    return points


class Size(NamedTuple):
    """One size of cluster: efficiencies, and the number of simulated events."""

    machines: int
    all_reduce: float
    k0: float
    kn: float
    n_events: int


def scale(constants: Constants, job: Workload, sizes: Sequence[int] = (32, 128, 512, 1024, 4096)) -> list[Size]:
    """Return *job* on more and more machines, with as many helpers or none; folded, so 4,096 take as long as 32."""
    found = []
    for n in sizes:
        ring = run("all-reduce", job, n, 0, constants)
        ours = [simulate(job, uniform(n, k, osdi20.CARD_RATE), "optimal", Options(fold=True)) for k in (0, n)]
        found.append(Size(n, ring.efficiency, ours[0].efficiency, ours[1].efficiency,
                          sum(outcome.n_events for outcome in ours)))
    return found
