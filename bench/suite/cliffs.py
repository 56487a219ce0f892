"""Curves over sizes have no cliff: no size where the next larger one is slower than 0.8 times per byte.

Where the possible (memory's speed, raw sockets') falls from one size to the next, as where a cache ends, a curve that
falls with it is as good as before: what counts is then how much nearer it was.
"""
from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpsfast.bench import two_nodes

LEAST_SHARE = 0.8
_OURS = "bpsfast"
#: Rows of ours that are no exchange, or one without sums: nothing of them is checked.
NO_SUMS = ("memory", two_nodes.SILENT)


class Point(NamedTuple):
    """One size of a curve: seconds, the 99th percentile's, and CPU seconds of an operation; the best possible time.

    The percentile is that of the median turn: what else the machine did in one turn is no cliff of ours.
    """

    nbytes: int
    median_s: float
    p99_s: float
    cpu_s: float
    bound_s: float | None = None


class Cliff(NamedTuple):
    """From one size to the next *quantity* per byte gets worse: *share* is what is left of it, 1 being as good.

    *possible* is what is left of the possible, at most 1.
    """

    curve: str
    quantity: str
    from_nbytes: int
    to_nbytes: int
    share: float
    possible: float = 1.0

    @property
    def is_ours(self) -> bool:
        """Tell whether it is worse than the possible's."""
        return self.share < LEAST_SHARE * self.possible

    def __str__(self) -> str:
        what = self.quantity if self.quantity == "goodput" else f"{self.quantity} per byte"
        return (f"{self.curve}: {what} is {self.share:.2f} times as good at {self.to_nbytes} B as at "
                f"{self.from_nbytes} B" + (f", the possible {self.possible:.2f} times" if self.possible < 1 else ""))


def curves(records: Iterable[Mapping[str, Any]], ours: bool = True) -> dict[str, list[Point]]:
    """Return points by size of each curve that has two or more, by its name; those of *ours*, or of all contestants."""
    found: dict[str, dict[int, Point]] = {}
    for record in records:
        chosen, measured = record.get("chosen", {}), record.get("measured", {})
        name = chosen.get("operation") or chosen.get("contestant")
        if not {"median_s", "p99_s", "cpu_s"} <= measured.keys() or "nbytes" not in chosen:
            continue
        if ours and (chosen.get("contestant") != _OURS or name in NO_SUMS):
            continue
        nodes = f", {chosen['n_nodes']} nodes" if chosen.get("n_nodes", 1) > 1 else ""
        bound = measured.get("bound")
        point = Point(chosen["nbytes"], measured["median_s"], _p99_s(chosen, measured),
                      statistics.median(measured["cpu_s"]), chosen["nbytes"] / bound if bound else None)
        found.setdefault(f"{record['section']}: {name}{nodes}", {})[point.nbytes] = point
    return {name: [points[nbytes] for nbytes in sorted(points)] for name, points in found.items() if len(points) > 1}


def _p99_s(chosen: Mapping[str, Any], measured: Mapping[str, Any]) -> float:
    samples, n = measured.get("samples_s", ()), chosen.get("n_per_round", 0)
    if not samples or not n or len(samples) % n:
        return float(measured["p99_s"])
    return float(np.median(np.percentile(np.reshape(samples, (-1, n)), 99, axis=1)))


def cliffs(found: Mapping[str, list[Point]]) -> list[Cliff]:
    """Return every step to the next size after which goodput, latency or CPU per byte is worse than allowed.

    Those that the possible does not explain are `Cliff.is_ours`.
    """
    steps = []
    for name, points in found.items():
        for before, after in itertools.pairwise(points):
            grown = after.nbytes / before.nbytes
            possible = 1.0
            if before.bound_s and after.bound_s:
                possible = min(1.0, before.bound_s * grown / after.bound_s)
            for quantity, field in (("goodput", "median_s"), ("p99", "p99_s"), ("CPU", "cpu_s")):
                small, large = getattr(before, field), getattr(after, field)
                if large > 0 and small * grown / large < LEAST_SHARE:
                    steps.append(Cliff(name, quantity, before.nbytes, after.nbytes, small * grown / large, possible))
    return steps
