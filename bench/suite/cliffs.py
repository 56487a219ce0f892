"""Curves over sizes have no cliff: no size where the next larger one is slower than 0.8 times per byte.

Where the possible (memory's speed, raw sockets') falls from one size to the next, as where a cache ends, a curve that
falls with it is as good as before: what counts is then how much nearer it was.

Turns of one size differ, by where the kernel has put whose threads. So each cliff has an interval, of whole turns drawn
again (as `regression` does), and is certain if all of it is beyond the limit.
"""
from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpsfast.bench import two_nodes

LEAST_SHARE = 0.8
_CONFIDENCE = 0.95
_DRAWS = 2000
_FEWEST = 3
_OURS = "bpsfast"
#: What has a curve, and the field of a point that tells it; a column of its turns.
_QUANTITIES = (("goodput", "median_s"), ("p99", "p99_s"), ("CPU", "cpu_s"))
#: Rows of ours that are no exchange, or one without sums: nothing of them is checked.
NO_SUMS = ("memory", two_nodes.SILENT)


class Point(NamedTuple):
    """One size of a curve: seconds, the 99th percentile's, and CPU seconds of an operation; the best possible time.

    The percentile is that of the median turn: what else the machine did in one turn is no cliff of ours. `turns` has
    the three of each turn, in that order; none where they are not known.
    """

    nbytes: int
    median_s: float
    p99_s: float
    cpu_s: float
    bound_s: float | None = None
    turns: tuple[tuple[float, ...], ...] = ()


class Cliff(NamedTuple):
    """From one size to the next *quantity* per byte gets worse: *share* is what is left of it, 1 being as good.

    *possible* is what is left of the possible, at most 1. *low* and *high* are the ends of the share's interval, 0 and
    infinite where there are too few turns, the share where turns are not known.
    """

    curve: str
    quantity: str
    from_nbytes: int
    to_nbytes: int
    share: float
    possible: float
    low: float
    high: float

    @property
    def is_ours(self) -> bool:
        """Tell whether it is worse than the possible's."""
        return self.share < LEAST_SHARE * self.possible

    @property
    def is_certain(self) -> bool:
        """Tell whether it is worse than the possible's however turns are drawn."""
        return self.high < LEAST_SHARE * self.possible

    def __str__(self) -> str:
        what = self.quantity if self.quantity == "goodput" else f"{self.quantity} per byte"
        between = f" ({self.low:.2f} to {self.high:.2f})" if self.low < self.high else ""
        return (f"{self.curve}: {what} is {self.share:.2f}{between} times as good at {self.to_nbytes} B as at "
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
        bound, turns = measured.get("bound"), _turns(chosen, measured)
        p99_s = statistics.median(turn[1] for turn in turns) if turns else float(measured["p99_s"])
        point = Point(chosen["nbytes"], measured["median_s"], p99_s, statistics.median(measured["cpu_s"]),
                      chosen["nbytes"] / bound if bound else None, turns)
        found.setdefault(f"{record['section']}: {name}{nodes}", {})[point.nbytes] = point
    return {name: [points[nbytes] for nbytes in sorted(points)] for name, points in found.items() if len(points) > 1}


def _turns(chosen: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[tuple[float, ...], ...]:
    samples, n, cpu_s = measured.get("samples_s", ()), chosen.get("n_per_round", 0), measured["cpu_s"]
    if not samples or not n or len(samples) != n * len(cpu_s):
        return ()
    medians_s, p99_s = np.percentile(np.reshape(samples, (-1, n)), [50, 99], axis=1)
    return tuple(zip(medians_s.tolist(), p99_s.tolist(), cpu_s))


def cliffs(found: Mapping[str, list[Point]]) -> list[Cliff]:
    """Return every step to the next size after which goodput, latency or CPU per byte is worse than allowed.

    Those that the possible does not explain are `Cliff.is_ours`. The same curves give the same intervals.
    """
    rng = np.random.default_rng(0)
    steps = []
    for name, points in found.items():
        for before, after in itertools.pairwise(points):
            grown = after.nbytes / before.nbytes
            possible = 1.0
            if before.bound_s and after.bound_s:
                possible = min(1.0, before.bound_s * grown / after.bound_s)
            for column, (quantity, field) in enumerate(_QUANTITIES):
                small, large = getattr(before, field), getattr(after, field)
                if large > 0 and (share := small * grown / large) < LEAST_SHARE:
                    low, high = _interval(before, after, column, rng) or (share / grown, share / grown)
                    steps.append(Cliff(name, quantity, before.nbytes, after.nbytes, share, possible, low * grown,
                                       high * grown))
    return steps


def _interval(before: Point, after: Point, column: int, rng: np.random.Generator) -> tuple[float, float] | None:
    """Return between what the time of one size by that of the next lies; None: nobody knows the turns."""
    if not before.turns or not after.turns:
        return None
    if min(len(before.turns), len(after.turns)) < _FEWEST:
        return 0.0, float("inf")
    small, large = (np.median(rng.choice(np.array(point.turns)[:, column], (_DRAWS, len(point.turns))), axis=1)
                    for point in (before, after))
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(small / large, [tail, 1 - tail])
    return float(low), float(high)
