"""Curves over sizes have no cliff: no size where the next larger one is slower than 0.8 times per byte."""
from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

LEAST_SHARE = 0.8
_OURS = "bpsfast"
#: Rows of ours that are no exchange, or one without sums.
_NOT_OURS = ("memory", "numpy, sums off")


class Point(NamedTuple):
    """One size of a curve: seconds, the 99th percentile's, and CPU seconds of an operation."""

    nbytes: int
    median_s: float
    p99_s: float
    cpu_s: float


class Cliff(NamedTuple):
    """From one size to the next *quantity* per byte gets worse: *share* is what is left of it, 1 being as good."""

    curve: str
    quantity: str
    from_nbytes: int
    to_nbytes: int
    share: float

    def __str__(self) -> str:
        return (f"{self.curve}: {self.quantity} per byte is {self.share:.2f} times as good at {self.to_nbytes} B as at "
                f"{self.from_nbytes} B")


def curves(records: Iterable[Mapping[str, Any]], ours: bool = True) -> dict[str, list[Point]]:
    """Return points by size of each curve that has two or more, by its name; those of *ours*, or of all contestants."""
    found: dict[str, dict[int, Point]] = {}
    for record in records:
        chosen, measured = record.get("chosen", {}), record.get("measured", {})
        name = chosen.get("operation") or chosen.get("contestant")
        if not {"median_s", "p99_s", "cpu_s"} <= measured.keys() or "nbytes" not in chosen:
            continue
        if ours and (chosen.get("contestant") != _OURS or name in _NOT_OURS):
            continue
        nodes = f", {chosen['n_nodes']} nodes" if chosen.get("n_nodes", 1) > 1 else ""
        point = Point(chosen["nbytes"], measured["median_s"], measured["p99_s"], statistics.median(measured["cpu_s"]))
        found.setdefault(f"{record['section']}: {name}{nodes}", {})[point.nbytes] = point
    return {name: [points[nbytes] for nbytes in sorted(points)] for name, points in found.items() if len(points) > 1}


def cliffs(found: Mapping[str, list[Point]]) -> list[Cliff]:
    """Return every step to the next size after which goodput, latency or CPU per byte is worse than allowed."""
    steps = []
    for name, points in found.items():
        for before, after in itertools.pairwise(points):
            grown = after.nbytes / before.nbytes
            for quantity, field in (("goodput", "median_s"), ("p99", "p99_s"), ("CPU", "cpu_s")):
                small, large = getattr(before, field), getattr(after, field)
                if large > 0 and small * grown / large < LEAST_SHARE:
                    steps.append(Cliff(name, quantity, before.nbytes, after.nbytes, small * grown / large))
    return steps
