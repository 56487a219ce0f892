"""Finds cliffs in benchmark curves over sizes: where the next size takes more than 1/0.8 of the time or CPU per byte.

If the bound (the speed of memory or of raw sockets) also falls from one size to the next, for example where a cache
ends, the curve is compared relative to the bound. The bound of CPU time is that of time.

Sizes are compared turn by turn, because turns of one round were measured within seconds of each other. Pairs of turns
are left out if CPUs were moved into or out of a shared cache between them. Turns also differ by the kernel's placement
of threads, so each cliff has a bootstrap interval over pairs of turns, and is certain if the whole interval is beyond
the limit.
"""
from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bpsfast.bench.harness import memory_bound
from bpsfast.tools.doctor import hardware

LEAST_SHARE = 0.8
_CONFIDENCE = 0.95
_DRAWS = 2000
#: Fewer pairs can all be beyond the limit by chance more often than the confidence allows.
_FEWEST = 6
_OURS = "bpsfast"
_QUANTITIES = ("goodput", "p99", "CPU")
#: Row of a job that moves gradients without summing them.
SILENT = "numpy, sums off"


class Turn(NamedTuple):
    """One turn of one size: seconds of each operation, CPU seconds of one, the bound in that round as seconds of each
    operation (none: unknown), and the time of a cache line between cores that share a cache (0: unknown).
    """

    samples_s: tuple[float, ...]
    cpu_s: float
    bound_s: tuple[float, ...] = ()
    handover_ns: float = 0.0


class Point(NamedTuple):
    """One size of a curve: medians over its turns, the bound, and the turns (none if unknown).

    The percentile is that of the median turn, so that other load in a single turn is not taken for a cliff.
    """

    nbytes: int
    median_s: float
    p99_s: float
    cpu_s: float
    bound_s: float | None = None
    turns: tuple[Turn, ...] = ()


class Cliff(NamedTuple):
    """A step to the next size at which `quantity` per byte gets worse: `share` of it remains (1: no change).

    `possible` is the share of the bound that remains, at most 1. `low` and `high` are the ends of the interval of share
    / possible; 0 and infinity if there are too few turns.
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
        """Return whether the curve falls more than the bound."""
        return self.share < LEAST_SHARE * self.possible

    @property
    def is_certain(self) -> bool:
        """Return whether the whole interval is beyond the limit."""
        return self.high < LEAST_SHARE

    def __str__(self) -> str:
        what = self.quantity if self.quantity == "goodput" else f"{self.quantity} per byte"
        between = f" ({self.low:.2f} to {self.high:.2f})" if self.high < math.inf else ""
        beside = f"the possible {self.possible:.2f} times: {self.share / self.possible:.2f}{between} of it"
        return (f"{self.curve}: {what} is {self.share:.2f}{'' if self.possible < 1 else between} times as good at "
                f"{self.to_nbytes} B as at {self.from_nbytes} B" + (f", {beside}" if self.possible < 1 else ""))


def curves(records: Iterable[Mapping[str, Any]], ours: bool = True) -> dict[str, list[Point]]:
    """Return curve -> points by size, for curves of *ours* (or of all contestants) with at least two points."""
    found: dict[str, dict[int, Point]] = {}
    records = list(records)
    by_name = {(record.get("section"), record["chosen"].get("operation"), record["chosen"].get("nbytes")): record
               for record in records if "chosen" in record}
    for record in records:
        chosen, measured = record.get("chosen", {}), record.get("measured", {})
        name = chosen.get("operation") or chosen.get("contestant")
        if not {"median_s", "p99_s", "cpu_s"} <= measured.keys() or "nbytes" not in chosen:
            continue
        if ours and (chosen.get("contestant") != _OURS or not has_sums(name)):
            continue
        nodes = f", {chosen['n_nodes']} nodes" if chosen.get("n_nodes", 1) > 1 else ""
        rows = [by_name.get((record["section"], each, chosen["nbytes"]), {}) for each in measured.get("bounds", ())]
        bound, turns = measured.get("bound"), _turns(chosen, measured, rows)
        p99_s = statistics.median(_p99_s(turn.samples_s) for turn in turns) if turns else float(measured["p99_s"])
        found.setdefault(f"{record['section']}: {name}{nodes}", {})[chosen["nbytes"]] = Point(
            chosen["nbytes"], measured["median_s"], p99_s, statistics.median(measured["cpu_s"]),
            chosen["nbytes"] / bound if bound else None, turns)
    return {name: [points[nbytes] for nbytes in sorted(points)] for name, points in found.items() if len(points) > 1}


def has_sums(operation: str) -> bool:
    """Return whether our row *operation* is an exchange whose sums are checked."""
    return operation != SILENT and not memory_bound.is_row(operation)


def _turns(chosen: Mapping[str, Any], measured: Mapping[str, Any], bounds: Sequence[Mapping[str, Any]]
           ) -> tuple[Turn, ...]:
    """Return the turns of a row with the bound of the rows *bounds*, or the bound in its record if there are none."""
    cpu_s, samples_s = measured["cpu_s"], _split(chosen, measured)
    if not samples_s:
        return ()
    handover_ns = measured.get("handover_ns") or [0.0] * len(cpu_s)
    best_s = [(each,) if each else () for each in measured.get("bound_s") or [None] * len(cpu_s)]
    in_rows = zip(*(_split(each["chosen"], each["measured"]) for each in bounds if each))
    for i, turns_s in zip(range(len(best_s)), in_rows):
        best_s[i] = min(turns_s, key=statistics.median) if best_s[i] else ()
    return tuple(map(Turn, samples_s, cpu_s, best_s, handover_ns))


def _split(chosen: Mapping[str, Any], measured: Mapping[str, Any]) -> list[tuple[float, ...]]:
    """Return a row's samples turn by turn, or [] if the ends of turns are unknown."""
    samples, n = measured.get("samples_s", ()), chosen.get("n_per_round", 0)
    if not samples or not n or len(samples) != n * len(measured["cpu_s"]):
        return []
    return [tuple(samples[i:i + n]) for i in range(0, len(samples), n)]


def cliffs(found: Mapping[str, list[Point]]) -> list[Cliff]:
    """Return every step to the next size at which goodput, latency or CPU per byte gets worse than allowed.

    `Cliff.is_ours` if the bound does not explain it. The intervals are deterministic.
    """
    rng = np.random.default_rng(0)
    steps = []
    for name, points in found.items():
        for before, after in itertools.pairwise(points):
            pairs = [(small, large) for small, large in zip(before.turns, after.turns)
                     if not hardware.differ(small.handover_ns, large.handover_ns)]
            for quantity in _QUANTITIES:
                grown = after.nbytes / before.nbytes
                left = [(grown * ratio, grown * _possible(quantity, *pair)) for pair in pairs
                        if (ratio := _ratio(quantity, *pair))]
                if any(math.isfinite(possible) for _, possible in left):
                    left = [each for each in left if math.isfinite(each[1])]
                ratio, best = _whole(quantity, before, after)
                shares, bests = zip(*left or [(grown * ratio, grown * best)])
                share = statistics.median(shares)
                if 0 < share < LEAST_SHARE:
                    steps.append(Cliff(name, quantity, before.nbytes, after.nbytes, share,
                                       min(1.0, statistics.median(bests)), *_interval(left, rng)))
    return steps


def _ratio(quantity: str, small: Turn, large: Turn) -> float:
    """Return the time of one operation of *small* divided by that of *large*; 0 if unknown."""
    if quantity == "CPU":
        return small.cpu_s / large.cpu_s if small.cpu_s > 0 and large.cpu_s > 0 else 0.0
    return _time_ratio(quantity, small.samples_s, large.samples_s)


def _possible(quantity: str, small: Turn, large: Turn) -> float:
    """Return the bound of *small* divided by that of *large*; infinity if unknown."""
    return _time_ratio(quantity, small.bound_s, large.bound_s) if small.bound_s and large.bound_s else math.inf


def _time_ratio(quantity: str, small_s: Sequence[float], large_s: Sequence[float]) -> float:
    if quantity != "p99":
        return statistics.median(small_s) / statistics.median(large_s)
    n = len(large_s)  # with more samples the percentile is nearer to the maximum
    parts = [small_s[i:i + n] for i in range(0, max(1, len(small_s) - n + 1), n)]
    return statistics.median(map(_p99_s, parts)) / _p99_s(large_s)


def _whole(quantity: str, before: Point, after: Point) -> tuple[float, float]:
    """Return `_ratio` and `_possible` of the points; used if turns are unknown or cannot be compared."""
    field = {"goodput": "median_s", "p99": "p99_s", "CPU": "cpu_s"}[quantity]
    small, large = getattr(before, field), getattr(after, field)
    return (float(small / large) if small > 0 and large > 0 else 0.0,
            before.bound_s / after.bound_s if before.bound_s and after.bound_s else math.inf)


def _p99_s(samples_s: Iterable[float]) -> float:
    return float(np.percentile(list(samples_s), 99))


def _interval(left: list[tuple[float, float]], rng: np.random.Generator) -> tuple[float, float]:
    """Return the interval of the remaining share of a row divided by that of the bound, which is at most 1."""
    if len(left) < _FEWEST:
        return 0.0, math.inf
    shares, possible = np.median(rng.choice(np.array(left), (_DRAWS, len(left))), axis=1).T
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(shares / np.minimum(possible, 1), [tail, 1 - tail])
    return float(low), float(high)
