"""The parts of `bench device`, each with a separate job, and the records that they return."""
from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bpsfast.base.process_identity import folder_prefix
from bpsfast.bench.device import overlap
from bpsfast.bench.device.copies import AFTER, BOTH, IN, OUT
from bpsfast.bench.device.footprint import METHODS
from bpsfast.bench.device.plan import LEAST_OF_BOUND, MOST_OF_ALONE, Plan
from bpsfast.bench.device.rank import COPIES, SUMS
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.harness.samples import Row, take_turns

Records = list[dict[str, Any]]
#: Timeout of a rank's answer that is not a measurement.
_ASK_S = 180.0


def sums(plan: Plan) -> Records:
    """Measure push_pull of one array, and of a stream of them, and plain copies of the same bytes."""
    records: Records = []
    with ContestantLauncher(plan.n_ranks, 1) as launcher:
        group = launcher.bpsfast(device=plan.device, **plan.job)
        records.append(record("device", {}, group.ask("facts", only=[0])[0]))
        for nbytes in plan.sizes:
            many = plan.n_arrays(nbytes)
            one = [Row(group, f"{SUMS}1", nbytes, "push_pull of one"),
                   Row(group, f"{COPIES}1, {AFTER}", nbytes, AFTER)]
            stream = [Row(group, f"{SUMS}{many}", nbytes, "push_pull of a stream"),
                      *(Row(group, f"{COPIES}{many}, {direction}", nbytes, direction) for direction in (BOTH, OUT, IN))]
            take_turns(one, plan.n_rounds, n=plan.n_samples(nbytes))
            take_turns(stream, plan.n_rounds, n=plan.n_samples(many * nbytes))
            for rows, n in ((one, 1), (stream, many)):
                found = [_sampled(row, n, plan) for row in rows]
                _compare(found)
                records += found
    return records


def _sampled(row: Row, n: int, plan: Plan) -> dict[str, Any]:
    """Return the record of *row*, whose operation is on *n* arrays."""
    return record("sums", {"operation": row.name, "nbytes": row.nbytes, "n_arrays": n, "n_ranks": plan.n_ranks,
                           "dtype": "float32", "n_per_round": row.n_per_round},
                  {"median_s": row.median_s, "rate": n * row.nbytes / row.median_s, "n_wrong": row.n_wrong,
                   "cpu_busy": row.cpu_busy, "cpu_s": row.cpu_s, "samples_s": row.samples_s})


def _compare(records: Records) -> None:
    """Add to the first record, push_pull's, the share that it reaches of the bounds in the other records."""
    ours, bound, *directions = (each["measured"] for each in records)
    ours |= {"of_bound": bound["median_s"] / ours["median_s"],
             "reaches_bound": bound["median_s"] / ours["median_s"] >= LEAST_OF_BOUND}
    if directions:
        ours["of_longer_direction"] = max(each["median_s"] for each in directions) / ours["median_s"]


def backward(plan: Plan) -> Records:
    """Measure steps with and without an exchange, in turns; on a GPU also by the profiler."""
    n = 3 if plan.quick else 10
    with ContestantLauncher(plan.n_ranks, 1) as launcher:
        group = launcher.bpsfast(device=plan.device, **plan.job)
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        n_wrong = 0
        for _ in range(plan.n_rounds):
            for exchanges in (False, True):
                for answer in group.ask("backward", exchanges, n, plan.backward, timeout_s=_ASK_S):
                    found[exchanges] += answer["steps"]
                    n_wrong += answer["n_wrong"]
        alone, ours = (_columns(found[exchanges]) for exchanges in (False, True))
        ratio = statistics.median(ours["stream_s"]) / statistics.median(alone["stream_s"])
        layers, nbytes, products = plan.backward
        records = [record("backward", {"n_layers": layers, "nbytes": nbytes, "n_products": products,
                                     "n_ranks": plan.n_ranks},
                          {"stream_ratio": ratio, "is_as_alone": ratio <= MOST_OF_ALONE, "n_wrong": n_wrong,
                           "alone": alone, "with_exchange": ours})]
        if plan.is_gpu:
            records += [record("profile", {"rank": rank}, profile)
                        for rank, profile in enumerate(group.ask("profile", timeout_s=_ASK_S))]
    return records


def _columns(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [step[name] for step in steps] for name in steps[0]}


def stages(plan: Plan) -> Records:
    """Measure how a step's stages overlap between two nodes of one rank each, over tcp on loopback."""
    n, nbytes = plan.step
    with tempfile.TemporaryDirectory(prefix=folder_prefix("trace")) as folder:
        with ContestantLauncher(2, 2) as launcher:
            group = launcher.bpsfast(device=plan.device, **{**plan.job, "transport": "tcp", "trace_dir": folder})
            row = Row(group, f"{SUMS}{n}", nbytes, "push_pull of a stream")
            take_turns([row], 1, n=4, n_warmup=3)
        found = overlap.load(Path(folder))
    chosen = found[-2:-1]  # not the last step, after which processes end
    return [record("stages", {"n_arrays": n, "nbytes": nbytes, "n_nodes": 2, "transport": "tcp"},
                   {**each.measured(), "n_wrong": row.n_wrong, "rounds_s": [other.whole_s for other in found],
                    "picture": each.picture()}) for each in chosen]


def training(plan: Plan) -> Records:
    """Train the digits' network: compare averages made on the device with those made by the CPU."""
    with ContestantLauncher(plan.n_ranks, 1) as launcher:
        group = launcher.bpsfast(device=plan.device, **_on_device(plan))
        return [record("training", {"n_steps": plan.n_training_steps, "rank": rank, "n_ranks": plan.n_ranks}, found)
                for rank, found in enumerate(group.ask("train", plan.n_training_steps, timeout_s=2 * _ASK_S))]


def memory(plan: Plan) -> Records:
    """Measure the memory that each method to push gradients takes, each in a separate job."""
    records: Records = []
    for method in METHODS:
        with ContestantLauncher(plan.n_ranks, 1) as launcher:
            group = launcher.bpsfast(device=plan.device, **_on_device(plan))
            records += [record("memory", {"rank": rank, "n_ranks": plan.n_ranks}, found) for rank, found
                        in enumerate(group.ask("footprint", method, plan.footprint_nbytes, timeout_s=_ASK_S))]
    return records


def _on_device(plan: Plan) -> dict[str, Any]:
    """Return the settings of a job whose torch tensors are on the device."""
    return {**plan.job, "host_device": not plan.is_gpu}


def record(section: str, chosen: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the result file."""
    return {"section": section, "chosen": chosen, "measured": measured}


#: Parts by name, in the order in which they run.
PARTS: dict[str, Callable[[Plan], Records]] = {
    "sums": sums, "backward": backward, "stages": stages, "training": training, "memory": memory}
