"""What the pages say of a result file: numbers by the names that claims give them."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bpsfast.bench import drawn
from bpsfast.bench.autotune import Run
from bpsfast.bench.claims.claim import Numbers, Records
from bpsfast.bench.helpers import Training


def eight_and_eight(rows: Records) -> Numbers:
    """By how much eight workers and as many helpers are above the optimum, in percent."""
    return {"above": 100 * _optimum_time(rows, "optimal", 8) - 100}


def naive(rows: Records) -> Numbers:
    """By how much BytePS's rule is faster where helpers are as many as workers, in percent, at most."""
    return {"faster": max(100 * _optimum_time(rows, "optimal", n) / _optimum_time(rows, "ps", n) - 100
                          for n in (2, 4, 8))}


def _optimum_time(rows: Records, contestant: str, n: int) -> float:
    [time] = [float(row["measured"]["time"]) for row in rows if row["chosen"]["contestant"] == contestant
              and row["chosen"]["n_workers"] == row["chosen"]["n_helpers"] == n]
    return time


def peers(rows: Records) -> Numbers:
    """gloo's and MPI's times on one machine, in times of ours."""
    gloo, mpi, in_place = drawn.times_ours(rows).values()
    slower = [nbytes for nbytes in in_place if in_place[nbytes] >= mpi[nbytes]]
    return {"least": min(gloo.values()), "most": max(gloo.values()), "mpi": max(1 / mpi[nbytes] for nbytes in mpi),
            "at_kb": min(mpi, key=mpi.__getitem__) // 1024,
            "from_kb": min(nbytes for nbytes in in_place if nbytes > max(slower, default=0)) // 1024}


def ddp(rows: Records) -> Numbers:
    """gloo's time of a step of DistributedDataParallel by ours."""
    medians = {(row["chosen"]["operation"], row["chosen"]["contestant"]): row["measured"]["median_s"]
               for row in rows if row["section"] == "step"}
    return {name: medians[f"{name}-bound", "gloo"] / medians[f"{name}-bound", "bpsfast"]
            for name in ("comm", "compute")}


def schedule(rows: Records) -> Numbers:
    """Other ways' times of a step by that of priority without a barrier, measured and simulated."""
    step = {row["chosen"]["way"]: (row["measured"]["median_s"], row["simulated"]["step_s"]) for row in rows}
    ours = step["priority, crossing"]
    return {f"{name}{kind}": step[way][at] / ours[at] for name, way in (("fifo", "fifo"), ("ddp", "DDP gloo"))
            for at, kind in enumerate(("", "_simulated"))}


def breakdown(rows: Records) -> Numbers:
    """On packets: the speeds with each part of the design, of an all-reduce's; how far the simulator is off, in %."""
    step = {row["chosen"]["part"]: (row["measured"]["median_s"], row["simulated"]["step_s"])
            for row in rows if row["section"] == "packets"}
    all_reduce, split, priority, crossing = (step[part][0] for part in (
        "all-reduce, FIFO", "+ optimal split", "+ priority and credit", "+ cross-barrier"))
    return {"split": all_reduce / split, "priority": all_reduce / priority, "crossing": all_reduce / crossing,
            "off": max(100 * abs(simulated / measured - 1) for measured, simulated in step.values())}


def helpers(rows: Records) -> Numbers:
    """The longest step while helpers go and come, in times of a median one."""
    calm, disturbed = (Training(**row) for row in rows if "at_s" in row)
    return {"times": max(disturbed.steps_s) / statistics.median(calm.steps_s)}


def codec(name: str) -> Callable[[Records], Numbers]:
    """Shares of memcpy's speed on float32; how long 4 MB take to be encoded."""
    def numbers(rows: Records) -> Numbers:
        by = {row["chosen"]["contestant"]: row for row in rows
              if (row["chosen"]["codec"], row["chosen"]["dtype"]) == (name, "float32")}
        found = {field: by[way]["measured"]["of_memcpy"] for field, way in
                 (("encode", "encode"), ("fed", "encode, error feedback"), ("decode", "decode"))}
        time_s = by["encode"]["measured"]["median_s"]
        return found | {"ms": 1e3 * time_s, "gbits": 8e-9 * by["encode"]["chosen"]["nbytes"] / time_s}

    return numbers


def compressed(name: str) -> Callable[[Records], Numbers]:
    """A step with a codec, by the number of machines."""
    def numbers(rows: Records) -> Numbers:
        found: Numbers = {}
        for row in rows:
            if row["chosen"]["codec"] == name:
                n, measured = row["chosen"]["n_machines"], row["measured"]
                found |= {f"ms{n}": 1e3 * measured["median_s"], f"speed{n}": measured["speed"],
                          f"expected{n}": 1e3 * measured["expected_s"],
                          f"sent{n}": statistics.median(map(max, measured["sent_nbytes"])) / 1e6,
                          f"above{n}": 100 * measured["median_s"] / measured["expected_s"] - 100}
        return found

    return numbers


def speeds(rows: Records) -> Numbers:
    """By codec with error feedback: its speed on four machines, in steps while one is made uncompressed."""
    return {_short(row): row["measured"]["speed"] for row in rows
            if row["section"] == "4 machines" and row["chosen"]["codec"].endswith("error_feedback")}


def accuracies(rows: Records) -> Numbers:
    """By codec with error feedback: points of accuracy won, the standard error, and by which its bytes are fewer."""
    found: Numbers = {}
    [uncompressed] = (row["measured"] for row in rows if row["chosen"]["codec"] == "uncompressed")
    for row in rows:
        points, sent = row["measured"]["points"], row["measured"]["sent_nbytes"]
        if row["chosen"]["codec"].endswith("error_feedback"):
            name = _short(row)
            found |= {name: statistics.fmean(points), f"{name}_error": statistics.stdev(points) / len(points) ** 0.5,
                      f"{name}_fewer": statistics.median(uncompressed["sent_nbytes"]) / statistics.median(sent)}
    return found | {"uncompressed": 100 * statistics.fmean(uncompressed["accuracy"])}


def _short(row: Mapping[str, Any]) -> str:
    return str(row["chosen"]["codec"]).partition(":")[0]


def of_table(rows: Records) -> Numbers:
    """What a machine sends of rows, rank 0's time of a step, and its node's memory."""
    both = [row["measured"] for row in rows if row["section"] == "rows"]
    [first] = [row["measured"] for row in rows if row["section"] == "rows" and row["chosen"]["rank"] == 0]
    shares = [nbytes / measured["nbytes"] for measured in both for nbytes in measured["sent_nbytes"]]
    return {"share": 100 * statistics.median(shares), "mb": statistics.median(first["sent_nbytes"]) / 1e6,
            "ms": 1e3 * statistics.median(first["samples_s"]),
            "memory": first["memory_nbytes"]["memory_segments"] / 1e6}


def tuned(rows: Records) -> Numbers:
    """How far what was chosen is from the grid's best, by start, in %; the slowest step in times the defaults'."""
    [defaults] = [row["measured"] for row in rows if row["section"] == "grid" and row["chosen"]["point"] is None]
    small, large = (row["measured"] for row in rows if row["section"] == "tuned")
    slowest_s = max(Run("", each["samples_s"], {}).slowest_s for each in (small, large))
    return {"small": 100 * small["excess"], "large": 100 * large["excess"], "slowest": slowest_s / defaults["median_s"]}


def neighbour(rows: Records) -> Numbers:
    """By helper and the other job's load: by how much its steps are longer, in %, and what is served in Gbit/s."""
    found: Numbers = {}
    for row in rows:
        name, measured = f"{row['chosen']['contestant']}{100 * row['chosen']['load']:.0f}", row["measured"]
        found |= {f"{name}_served": measured["served_gbps"], f"{name}_median": 100 * measured["change_median"],
                  f"{name}_p95": 100 * measured["change_p95"]}
    return found


def ladder(rows: Records) -> Numbers:
    """The range over models of all mistakes together: in times of ours, and of tcp."""
    medians = _ladder_medians(rows)
    models = {model for model, _ in medians}
    by_ours, by_tcp = ([medians[model, "vanilla"] / medians[model, other] for model in models]
                       for other in ("ours", "tcp"))
    return _range(by_ours) | {f"tcp_{name}": value for name, value in _range(by_tcp).items()}


def rung(name: str) -> Callable[[Records], Numbers]:
    """A mistake's time in times of ours, by model."""
    def numbers(rows: Records) -> Numbers:
        medians = _ladder_medians(rows)
        return {model.partition("-")[0]: medians[model, name] / medians[model, "ours"]
                for model, each in medians if each == name}

    return numbers


def _ladder_medians(rows: Records) -> dict[tuple[str, str], float]:
    return {(row["chosen"]["model"], row["chosen"]["rung"]): row["measured"]["median_s"] for row in rows
            if row["section"] == "ladder"}


def frameworks(rows: Records) -> Numbers:
    """By how much adapters take longer than NumPy's arrays, and (*less*) how much less, in percent."""
    medians = {(row["workload"], row["row"]): row["median_s"] for row in rows}
    found: Numbers = {}
    for prefix, workload in (("large_", "64 MB"), ("small_", "161 small tensors")):
        changes = _range(100 * (median / medians[workload, "numpy"] - 1) for (of, row), median in medians.items()
                         if of == workload and not row.startswith("numpy"))
        found |= {prefix + name: value for name, value in changes.items()}
    return found | {"least_less": -found["small_most"], "most_less": -found["small_least"]}


def expr3(rows: Records) -> Numbers:
    """How far the simulator is from the paper on 256 GPUs, in points."""
    errors = [abs(cell["error"]) for cell in rows[0]["cells"] if (cell["figure"], cell["at"]) == ("15/16", "256 GPUs")]
    return {"points": 100 * statistics.fmean(errors)}


def _range(values: Iterable[float]) -> Numbers:
    found = list(values)
    return {"least": min(found), "most": max(found)}
