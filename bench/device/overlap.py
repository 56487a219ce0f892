"""For `bench device`: computes from a trace how stages of a step overlap: to host, sum, wire, receive, to device."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bpsfast import trace
from bpsfast.tools.trace.summary import Times, length, union

STAGES = ("to host", "sum", "wire", "receive", "to device")
_WIDTH = 72


class Overlap(NamedTuple):
    """One round of a job, in seconds. `stages`: when each was busy on any process, from the first copy's begin on."""

    round: int
    whole_s: float
    stages: dict[str, list[tuple[float, float]]]
    at_least: list[float]  # share of the whole in which 1, 2, ... stages or more were busy at once

    def picture(self) -> str:
        """Return a line for each stage: # where it was busy all of a column's time, - where for some of it."""
        step_s = self.whole_s / _WIDTH
        lines = []
        for stage in STAGES:
            marks = []
            for i in range(_WIDTH):
                busy_s = sum(max(0.0, min(end, (i + 1) * step_s) - max(begin, i * step_s))
                             for begin, end in self.stages[stage])
                marks.append("#" if busy_s > 0.99 * step_s else "-" if busy_s > 0 else " ")
            lines.append(f"{stage:>9} |{''.join(marks)}|")
        return "\n".join(lines)

    def measured(self) -> dict[str, Any]:
        """Return it for the result file."""
        return {"round": self.round, "whole_s": self.whole_s, "stages": self.stages, "at_least": self.at_least,
                "busy_s": {stage: sum(end - begin for begin, end in times) for stage, times in self.stages.items()}}


def load(folder: Path) -> list[Overlap]:
    """Return all rounds of which the traces in *folder* have every stage. Raises as `trace.load`."""
    rounds: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for process in trace.load(folder).processes:
        for span in process.spans:
            if span.kind in STAGES:
                times = rounds.setdefault(span.args["round"], {stage: [] for stage in STAGES})
                times[span.kind].append((span.begin_ns, span.end_ns))
    return [overlap(number, times) for number, times in sorted(rounds.items()) if all(times.values())]


def overlap(number: int, times: Mapping[str, Iterable[tuple[int, int]]]) -> Overlap:
    """Return how the stages of round *number*, busy at *times* (ns), overlap."""
    busy: dict[str, Times] = {stage: union(times[stage]) for stage in STAGES}
    begin = min(each[0][0] for each in busy.values())
    whole = max(max(end for _, end in each) for each in busy.values()) - begin
    at_least = [length(covered(list(busy.values()), n)) / whole for n in range(1, len(STAGES) + 1)]
    shown = {stage: [((a - begin) * 1e-9, (b - begin) * 1e-9) for a, b in each] for stage, each in busy.items()}
    return Overlap(number, whole * 1e-9, shown, at_least)


def covered(several: Sequence[Times], n: int) -> Times:
    """Return when at least *n* of *several*, each as `union` returns them, are at once."""
    edges = sorted((at, change) for times in several for begin, end in times for at, change in ((begin, 1), (end, -1)))
    found: list[tuple[int, int]] = []
    depth, since = 0, 0
    for at, change in edges:
        if depth >= n > depth + change:
            found.append((since, at))
        if depth < n <= depth + change:
            since = at
        depth += change
    return union(time for time in found if time[0] < time[1])
