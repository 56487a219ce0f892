"""`bench push_pull` beside MPI libraries, in one process each: blocks of calls of all contestants alternate.

Where two cores lie on the host of a virtual machine, and what else runs there, changes within a minute, and with it
every latency. Only blocks that follow each other within one process compare, so ratios are formed block by block.
"""
from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bpsfast.bench.harness import table
from bpsfast.bench.harness.cpu_load import CpuLoad
from bpsfast.bench.push_pull import mpi_environments
from bpsfast.bench.push_pull.options import EMPTY, PAIRED, Plan
from bpsfast.orchestration.errors import BpsError

#: Two cores are near each other if a cache line takes at most this many nanoseconds from one to the other.
NEAR_NS = 100.0
_GAP_US = 300
#: Sizes of the rows after work, and beside busy processes.
_SOME_SIZES = (4 << 10, 1 << 20)
_N_DRAWS = 2000
_TIMEOUT_S = 1800.0
_OURS = ("numpy", "torch", "backend")
#: Of the rows in a result file.
SECTION = "beside MPI"
#: What is done between, or beside, calls: by title the work in us and the busy processes.
ALONE = "one call after another"
CONDITIONS = {ALONE: (0, 0), f"after {_GAP_US} us of work": (_GAP_US, 0),
              "beside one busy process": (0, 1), "beside two busy processes": (0, 2)}


def run(plan: Plan, libraries: Sequence[str]) -> list[dict[str, Any]]:
    """Measure our operations beside each of *libraries* under all conditions; print tables and return records."""
    records = []
    has_torch = "torch" in plan.operations
    names = ["numpy", "numpy out", "segment", "mpi", "mpi out", *(["torch", "backend", EMPTY] if has_torch else []),
             *(["gloo"] if "gloo" in plan.peers else [])]
    for title, (gap_us, n_hogs) in CONDITIONS.items():
        sizes = plan.sizes if not gap_us and not n_hogs else _SOME_SIZES
        found = {library: _launch(library, plan, sizes, names, gap_us, n_hogs) for library in libraries}
        plan.say(_table(f"{title} (us; near: cores a cache line of {NEAR_NS:.0f} ns apart)", found) + "\n")
        records += [row for library, each in found.items() for record in each
                    for row in rows(record, title, library, plan.n_ranks)]
    return records


def rows(record: Mapping[str, Any], condition: str, library: str, n_ranks: int) -> list[dict[str, Any]]:
    """Return what a rank has measured at one size as rows of a result file, a contestant each.

    A sample is a block's median.
    """
    return [{"section": SECTION,
             "chosen": {"condition": condition, "library": library, "operation": name, "nbytes": record["nbytes"],
                        "n_ranks": n_ranks, "n_per_round": record["n_calls"]},
             "measured": {"median_s": statistics.median(each["median_s"] for each in blocks),
                          "samples_s": [each["median_s"] for each in blocks],
                          **{field: [each[field] for each in blocks] for field in ("mean_s", "p99_s", "cpu_s")},
                          "handover_ns": record["handover_ns"], "direct_sums": record["direct_sums"]}}
            for name, blocks in record["blocks"].items()]


def samples_us(found: Iterable[Mapping[str, Any]], condition: str = ALONE
               ) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Return from rows of a result file, by library and bytes, the medians of each contestant's blocks."""
    medians: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in found:
        if row["section"] == SECTION and row["chosen"]["condition"] == condition:
            chosen = row["chosen"]
            medians.setdefault((chosen["library"], chosen["nbytes"]), {})[chosen["operation"]] = [
                1e6 * each for each in row["measured"]["samples_s"]]
    return medians


def _launch(library: str, plan: Plan, sizes: Sequence[int], names: Sequence[str], gap_us: int, n_hogs: int
            ) -> list[dict[str, Any]]:
    """Return what rank 0 printed, one record a size."""
    wanted = {"sizes": list(sizes), "n_rounds": max(5, plan.n_rounds), "gap_us": gap_us, "names": list(names)}
    command = mpi_environments.command(library, plan.n_ranks, ["-m", "bpsfast.bench.push_pull.paired_rank",
                                                              json.dumps(wanted)])
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    title = mpi_environments.TITLES[library]
    with CpuLoad(0, n_hogs):
        try:
            done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as exc:
            raise BpsError(f"ranks under {title} were not ready with {len(sizes)} sizes within {_TIMEOUT_S:g} s: "
                           f"{exc.stderr!r:.1000}") from exc
    if done.returncode:
        raise BpsError(f"ranks under {title} ({' '.join(command[:4])} ...) ended with {done.returncode}: "
                       f"{done.stderr[-2000:]}")
    return [json.loads(line.removeprefix(PAIRED)) for line in done.stdout.splitlines() if line.startswith(PAIRED)]


def _medians_us(record: Mapping[str, Any], name: str, field: str = "median_s") -> list[float]:
    return [block[field] * 1e6 for block in record["blocks"].get(name, ())]


def best_mpi_us(medians: Mapping[str, Sequence[float]], suffix: str = "") -> list[float]:
    """Return the faster of MPI's ways, round by round; *suffix* " out": into another array."""
    ways = [medians[name] for name in ("mpi" + suffix, *(() if suffix else ("mpi in pieces",))) if name in medians]
    return [min(each) for each in zip(*ways)]


def interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the paired ratios theirs / ours, and its 95 % interval by resampling rounds."""
    ratios = [b / a for a, b in zip(ours, theirs)]
    draw = random.Random(len(ratios))
    drawn = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_N_DRAWS))
    return statistics.median(ratios), drawn[int(0.025 * _N_DRAWS)], drawn[int(0.975 * _N_DRAWS)]


def _table(title: str, found: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    lines = [["bytes", "MPI", "cores", *_OURS, "gloo", "MPI us", "MPI / numpy (95 %)", "MPI / torch", "mean numpy",
              "mean MPI", "CPU numpy", "CPU MPI"]]
    for library, records in found.items():
        for record in records:
            best = best_mpi_us({name: _medians_us(record, name) for name in record["blocks"]})

            def shown(name: str, field: str = "median_s", record: dict[str, Any] = record) -> str:
                values = _medians_us(record, name, field)
                return f"{statistics.median(values):.2f}" if values else "-"

            ratio, low, high = interval(_medians_us(record, "numpy"), best)
            torch_us = _medians_us(record, "torch")
            handover_ns = statistics.median(record["handover_ns"])
            lines.append([str(record["nbytes"]), mpi_environments.TITLES[library],
                          "near" if 0 < handover_ns <= NEAR_NS else "far", *map(shown, _OURS), shown("gloo"),
                          f"{statistics.median(best):.2f}", f"{ratio:.2f} ({low:.2f} to {high:.2f})",
                          f"{interval(torch_us, best)[0]:.2f}" if torch_us else "-", shown("numpy", "mean_s"),
                          shown("mpi", "mean_s"), shown("numpy", "cpu_s"), shown("mpi", "cpu_s")])
    return f"{title}\n{table.plain(lines)}"
