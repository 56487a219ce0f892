"""The claims of the README."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bpsfast.bench import drawn
from bpsfast.bench.claims.claim import Claim, Numbers, Records
from bpsfast.bench.helpers import Training


def _eight_and_eight(rows: Records) -> Numbers:
    return {"above": 100 * _time(rows, "optimal", 8) - 100}


def _naive(rows: Records) -> Numbers:
    return {"faster": max(100 * _time(rows, "optimal", n) / _time(rows, "ps", n) - 100 for n in (2, 4, 8))}


def _time(rows: Records, contestant: str, n: int) -> float:
    [time] = [float(row["measured"]["time"]) for row in rows if row["chosen"]["contestant"] == contestant
              and row["chosen"]["n_workers"] == row["chosen"]["n_helpers"] == n]
    return time


def _peers(rows: Records) -> Numbers:
    gloo, mpi, in_place = drawn.times_ours(rows).values()
    slower = [nbytes for nbytes in in_place if in_place[nbytes] >= mpi[nbytes]]
    return {"least": min(gloo.values()), "most": max(gloo.values()), "mpi": max(1 / mpi[nbytes] for nbytes in mpi),
            "at_kb": min(mpi, key=mpi.__getitem__) // 1024,
            "from_kb": min(nbytes for nbytes in in_place if nbytes > max(slower, default=0)) // 1024}


def _ddp(rows: Records) -> Numbers:
    medians = {(row["chosen"]["operation"], row["chosen"]["contestant"]): row["measured"]["median_s"]
               for row in rows if row["section"] == "step"}
    return {name: medians[f"{name}-bound", "gloo"] / medians[f"{name}-bound", "bpsfast"]
            for name in ("comm", "compute")}


def _schedule(rows: Records) -> Numbers:
    step = {row["chosen"]["way"]: (row["measured"]["median_s"], row["simulated"]["step_s"]) for row in rows}
    ours = step["priority, crossing"]
    return {f"{name}{kind}": step[way][at] / ours[at] for name, way in (("fifo", "fifo"), ("ddp", "DDP gloo"))
            for at, kind in enumerate(("", "_simulated"))}


def _helpers(rows: Records) -> Numbers:
    calm, disturbed = (Training(**row) for row in rows if "at_s" in row)
    return {"times": max(disturbed.steps_s) / statistics.median(calm.steps_s)}


def _by_codec(of: Callable[[Mapping[str, Any]], Numbers],
              machines: str | None = None) -> Callable[[Records], Numbers]:
    def numbers(rows: Records) -> Numbers:
        return {f"{row['chosen']['codec'].partition(':')[0]}{name}": value for row in rows
                if machines in (None, row["section"]) and row["chosen"]["codec"].endswith("error_feedback")
                for name, value in of(row["measured"]).items()}

    return numbers


def _points(measured: Mapping[str, Any]) -> Numbers:
    points = measured["points"]
    return {"": statistics.fmean(points), "_error": statistics.stdev(points) / len(points) ** 0.5}


def _rows(rows: Records) -> Numbers:
    shares = [nbytes / row["measured"]["nbytes"] for row in rows if row["section"] == "rows"
              for nbytes in row["measured"]["sent_nbytes"]]
    return {"share": 100 * statistics.median(shares)}


def _autotune(rows: Records) -> Numbers:
    small, large = (row["measured"]["excess"] for row in rows if row["section"] == "tuned")
    return {"small": 100 * small, "large": 100 * large}


def _neighbour(rows: Records) -> Numbers:
    change = {row["chosen"]["load"]: row["measured"]["change_median"] for row in rows
              if row["chosen"]["contestant"] == "quota"}
    return {"half": 100 * change[0.5], "full": 100 * change[1.0]}


def _ladder(rows: Records) -> Numbers:
    medians = {(row["chosen"]["model"], row["chosen"]["rung"]): row["measured"]["median_s"] for row in rows
               if row["section"] == "ladder"}
    return _range(medians[model, "vanilla"] / medians[model, "ours"] for model, rung in medians if rung == "ours")


def _frameworks(rows: Records) -> Numbers:
    medians = {(row["workload"], row["row"]): row["median_s"] for row in rows}
    found: Numbers = {}
    for prefix, workload in (("large_", "64 MB"), ("small_", "161 small tensors")):
        changes = _range(100 * (median / medians[workload, "numpy"] - 1) for (of, row), median in medians.items()
                         if of == workload and not row.startswith("numpy"))
        found |= {prefix + name: value for name, value in changes.items()}
    return found


def _range(values: Iterable[float]) -> Numbers:
    found = list(values)
    return {"least": min(found), "most": max(found)}


def _expr3(rows: Records) -> Numbers:
    errors = [abs(cell["error"]) for cell in rows[0]["cells"] if (cell["figure"], cell["at"]) == ("15/16", "256 GPUs")]
    return {"points": 100 * statistics.fmean(errors)}


#: In the README's order.
CLAIMS = (
    Claim("push_pull_one_machine.jsonl", "MPI is faster below {from_kb:.0f} KB", _peers),
    Claim("optimum_full.jsonl", "Eight workers and as many helpers are {above:.1f} % above the optimum",
          _eight_and_eight),
    Claim("optimum_full.jsonl", "as many helpers as workers ({faster:.1f} % faster at most)", _naive),
    Claim("push_pull_one_machine.jsonl", "gloo takes {least:.1f} to {most:.0f} times as long as", _peers),
    Claim("push_pull_one_machine.jsonl", "Open MPI is faster, by up to {mpi:.0f} times for {at_kb:.0f} KB", _peers),
    Claim("push_pull_one_machine.jsonl", "ours is the faster one from {from_kb:.0f} KB on", _peers),
    Claim("ddp.jsonl", "makes {comm:.1f} times gloo's steps where communication bounds it, and "
          "{compute:.2f} times where", _ddp),
    Claim("schedule.jsonl", "a step in 1/{fifo:.2f} of `fifo`'s time and 1/{ddp:.2f} of DistributedDataParallel's over "
          "gloo; the simulator says 1/{fifo_simulated:.2f} and 1/{ddp_simulated:.2f}", _schedule),
    Claim("helpers.jsonl", "step is {times:.1f} times a median one", _helpers),
    Claim("compressed.jsonl", "{topk:.1f} (`topk` 1 %), {onebit:.1f} (`onebit`), {int8:.1f} (`int8`)",
          _by_codec(lambda measured: {"": measured["speed"]}, "4 machines")),
    Claim("accuracy.jsonl", "{topk:.2f} +- {topk_error:.2f}, {onebit:.2f} +- {onebit_error:.2f}, {int8:.2f} +- "
          "{int8_error:.2f}", _by_codec(_points)),
    Claim("rows.jsonl", "share of the dense bytes | {share:.2f} %", _rows),
    Claim("autotune.jsonl", "distance to the best of a grid | {small:+.1f} %, {large:+.1f} %", _autotune),
    Claim("neighbour.jsonl", "{half:+.1f} % at half load, {full:+.1f} % at full", _neighbour),
    Claim("ladder.jsonl", "all left out: times of ours | {least:.0f} to {most:.0f}", _ladder),
    Claim("frameworks.jsonl", "{large_least:+.0f} to {large_most:+.0f} %; {small_most:+.0f} to {small_least:+.0f} %",
          _frameworks),
    Claim("expr3.json", "mean absolute error | {points:.1f} points", _expr3),
)
