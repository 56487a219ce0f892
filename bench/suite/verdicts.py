"""The verdict of `bench suite` on this machine: its bottleneck, how near it comes to the formulas, and cliffs."""
from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bpsfast.bench.push_pull import cliffs
from bpsfast.bench.suite.pieces import Outcome

_NEAR = 0.8
_BUSY = 0.8
_MOST_CLIFFS = 4
#: Plain sockets, whose bytes are not checked.
_RAW = "raw"
Record = Mapping[str, Any]


class Verdict(NamedTuple):
    """One line: the question, the answer, and whether it is good (None: nothing was promised)."""

    question: str
    answer: str
    is_good: bool | None = None


def judge(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Return the verdicts on the pieces that ran."""
    by_name = {outcome.name: outcome.records for outcome in outcomes if outcome.records}
    found = [_wrong(outcomes)]
    if "summation" in by_name:
        found.append(_memory(by_name["summation"]))
    if "push_pull" in by_name:
        found.append(_one_machine(by_name["push_pull"]))
    if "push_pull_nodes" in by_name:
        found += _nodes(by_name["push_pull_nodes"])
    if "optimum" in by_name:
        found.append(_formula(by_name["optimum"]))
    return [*found, *_cliffs(outcomes)]


def _wrong(outcomes: Sequence[Outcome]) -> Verdict:
    n_wrong, n_checked = 0, 0
    for outcome in outcomes:
        for record in outcome.records:
            measured, chosen = record.get("measured", {}), record.get("chosen", {})
            if "n_wrong" in measured and cliffs.has_sums(chosen.get("operation") or "") and (
                    chosen.get("contestant") != _RAW):
                n_checked, n_wrong = n_checked + 1, n_wrong + int(measured["n_wrong"])
                n_wrong += not measured.get("losses_alike", True)
    if not n_checked:
        return Verdict("wrong results", "no row was checked")
    return Verdict("wrong results", f"{n_wrong} in {n_checked} rows that were checked", n_wrong == 0)


def _memory(records: Sequence[Record]) -> Verdict:
    rows = [record for record in records if record["section"] == "summation"]
    n_cores = max(record["chosen"]["n_threads"] for record in rows)
    memory = max(record["measured"]["bits"] * record["measured"]["traffic"] for record in rows
                 if record["chosen"]["n_threads"] == n_cores)
    [core] = [record["measured"] for record in rows if record["chosen"]["n_threads"] == 1
              and (record["chosen"]["operation"], record["chosen"]["dtype"]) == ("sum, fused", "float32")]
    by_memory, by_cores = memory / (core["traffic"] + 2), core["core_bits"] * n_cores
    what = "memory bandwidth" if by_memory < by_cores else "its cores"
    return Verdict("a server's limit", f"{what}, at a card of {min(by_memory, by_cores) / 1e9:.0f} Gbit/s (memory "
                                       f"{memory / 1e9:.0f} Gbit/s, a core sums {core['core_bits'] / 1e9:.0f})")


def _one_machine(records: Sequence[Record]) -> Verdict:
    largest = _largest(records, "by size")
    if largest is None:
        return Verdict("push_pull, one machine", "no size at which it was asked what memory allows")
    share, nbytes = largest["measured"]["efficiency"], largest["chosen"]["nbytes"]
    what = "memory limits it" if share >= _NEAR else "not memory alone: other programs, or the CPU"
    return Verdict("push_pull, one machine", f"{share:.2f} of what memory allows at {nbytes} B: {what}", share >= _NEAR)


def _largest(records: Sequence[Record], section: str) -> Record | None:
    """Return the record of the largest size at which push_pull of NumPy arrays has a bound, in *section*."""
    rows = [record for record in records if record["section"] == section and record["measured"].get("efficiency")
            and record["chosen"]["operation"] == "numpy"]
    return max(rows, key=lambda record: record["chosen"]["nbytes"], default=None)


def _nodes(records: Sequence[Record]) -> list[Verdict]:
    found = []
    for section in dict.fromkeys(record["section"] for record in records):
        largest = _largest(records, section)
        if largest is None:
            continue
        measured = largest["measured"]
        busy, share = statistics.fmean(measured["cpu_busy"]), measured["efficiency"]
        is_cpu, is_network = busy >= _BUSY, share >= _NEAR and section != "loopback"  # loopback has no rate of its own
        what = "the network limits it" if is_network else "the CPU limits it" if is_cpu else "neither is full"
        cpu_s_per_gb = statistics.median(measured["cpu_s"]) / largest["chosen"]["nbytes"] * 1e9
        each_way = 8 * largest["chosen"]["nbytes"] / measured["median_s"] / 1e9
        found.append(Verdict(f"push_pull, two nodes, {section}",
                             f"{each_way:.2f} Gbit/s of gradients, {share:.2f} of raw sockets, CPUs {100 * busy:.0f} % "
                             f"busy, {cpu_s_per_gb:.2f} CPU s/GB: {what}",
                             None if is_cpu and not is_network else share >= _NEAR))
    return found


def _formula(records: Sequence[Record]) -> Verdict:
    cells = [record["measured"] for record in records if record["chosen"].get("contestant") == "optimal"
             and record["measured"].get("formula") is not None]
    good = [abs(cell["dev"]) for cell in cells if not cell["void"]]
    if not good:
        return Verdict("the formula", f"{len(cells)} cells, all void: the CPUs were busy with other things")
    text = f"{len(good)} of {len(cells)} cells not void, at most {100 * max(good):.0f} % from it"
    return Verdict("the formula", text, max(good) <= 1 - _NEAR)


def _cliffs(outcomes: Sequence[Outcome]) -> list[Verdict]:
    curves = cliffs.curves(record for outcome in outcomes for record in outcome.records if "section" in record)
    steps = cliffs.cliffs(curves)
    if not curves:
        return []
    ours = sorted((step for step in steps if step.is_ours), key=lambda step: step.share / step.possible)
    certain, perhaps = ([step for step in ours if step.is_certain is known] for known in (True, False))
    falls = f"; where the possible falls, too: {len(steps) - len(ours)}" if len(steps) > len(ours) else ""
    if not ours:
        return [Verdict("cliffs", f"none in {len(curves)} curves (goodput, p99, CPU per byte){falls}", True)]
    found = [_listed(certain)] if certain else []
    if perhaps:
        found.append(f"not certain, of more turns: {_listed(perhaps)}")
    return [Verdict("cliffs", "; ".join(found) + falls, False)]


def _listed(steps: Sequence[cliffs.Cliff]) -> str:
    more = f"; {len(steps) - _MOST_CLIFFS} more" if len(steps) > _MOST_CLIFFS else ""
    return "; ".join(map(str, steps[:_MOST_CLIFFS])) + more
