"""Finds cliffs in curves over sizes: a size where the next larger one is slower than 0.8 times per byte.

Where the possible (memory's speed, raw sockets') falls from one size to the next, as where a cache ends, a curve that
falls with it is as good as before: what counts is then how much nearer it was. The possible of CPU is that of time.

Sizes are compared turn by turn, since those of one round were measured within seconds: what a machine is like for
minutes both had, and turns between which its CPUs were moved out of one cache, or into one, are left out. Turns
differ, by where the kernel has put whose threads. So each cliff has an interval, of pairs of turns drawn again, and is
certain if all of it is beyond the limit.
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
#: Of fewer pairs all can be beyond the limit by chance more often than the confidence says.
_FEWEST = 6
_OURS = "bpsfast"
_QUANTITIES = ("goodput", "p99", "CPU")
#: The row of a job that moves gradients and does not sum them.
SILENT = "numpy, sums off"


class Turn(NamedTuple):
    """One turn of one size: seconds of each operation, CPU seconds of one; the best that was possible in that round, as
    seconds of each (none: nobody knows); how long a cache line took between cores that share a cache (0: nobody knows).
    """

    samples_s: tuple[float, ...]
    cpu_s: float
    bound_s: tuple[float, ...] = ()
    handover_ns: float = 0.0


class Point(NamedTuple):
    """One size of a curve: medians of all its turns, the best possible time; and the turns, none if nobody knows them.

    The percentile is that of the median turn: what else the machine did in one turn is no cliff of ours.
    """

    nbytes: int
    median_s: float
    p99_s: float
    cpu_s: float
    bound_s: float | None = None
    turns: tuple[Turn, ...] = ()


class Cliff(NamedTuple):
    """From one size to the next *quantity* per byte gets worse: *share* is what is left of it, 1 being as good.

    *possible* is what is left of the possible, at most 1. *low* and *high* are the ends of the interval of share by
    possible; 0 and infinite where there are too few turns.
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
        return self.high < LEAST_SHARE

    def __str__(self) -> str:
        what = self.quantity if self.quantity == "goodput" else f"{self.quantity} per byte"
        between = f" ({self.low:.2f} to {self.high:.2f})" if self.high < math.inf else ""
        beside = f"the possible {self.possible:.2f} times: {self.share / self.possible:.2f}{between} of it"
        return (f"{self.curve}: {what} is {self.share:.2f}{'' if self.possible < 1 else between} times as good at "
                f"{self.to_nbytes} B as at {self.from_nbytes} B" + (f", {beside}" if self.possible < 1 else ""))


def curves(records: Iterable[Mapping[str, Any]], ours: bool = True) -> dict[str, list[Point]]:
    """Return points by size of each curve that has two or more, by its name; those of *ours*, or of all contestants."""
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
    """Tell whether a row of ours called so is an exchange whose sums are checked."""
    return operation != SILENT and not memory_bound.is_row(operation)


def _turns(chosen: Mapping[str, Any], measured: Mapping[str, Any], bounds: Sequence[Mapping[str, Any]]
           ) -> tuple[Turn, ...]:
    """Return the turns of a row whose possible is that of the rows *bounds*, or its own word if there are none."""
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
    """Return a row's samples turn by turn; none if nobody knows where one ends."""
    samples, n = measured.get("samples_s", ()), chosen.get("n_per_round", 0)
    if not samples or not n or len(samples) != n * len(measured["cpu_s"]):
        return []
    return [tuple(samples[i:i + n]) for i in range(0, len(samples), n)]


def cliffs(found: Mapping[str, list[Point]]) -> list[Cliff]:
    """Return every step to the next size after which goodput, latency or CPU per byte is worse than allowed.

    Those that the possible does not explain are `Cliff.is_ours`. The same curves give the same intervals.
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
    """Return the time of one operation of *small* by that of *large*; 0: nobody knows."""
    if quantity == "CPU":
        return small.cpu_s / large.cpu_s if small.cpu_s > 0 and large.cpu_s > 0 else 0.0
    return _time_ratio(quantity, small.samples_s, large.samples_s)


def _possible(quantity: str, small: Turn, large: Turn) -> float:
    """Return the best possible time of *small* by that of *large*; infinite: nobody knows."""
    return _time_ratio(quantity, small.bound_s, large.bound_s) if small.bound_s and large.bound_s else math.inf


def _time_ratio(quantity: str, small_s: Sequence[float], large_s: Sequence[float]) -> float:
    if quantity != "p99":
        return statistics.median(small_s) / statistics.median(large_s)
    n = len(large_s)  # of more samples the percentile is nearer to the worst one
    parts = [small_s[i:i + n] for i in range(0, max(1, len(small_s) - n + 1), n)]
    return statistics.median(map(_p99_s, parts)) / _p99_s(large_s)


def _whole(quantity: str, before: Point, after: Point) -> tuple[float, float]:
    """Return what `_ratio` and `_possible` do, of all turns: where they are not known, or none can be compared."""
    field = {"goodput": "median_s", "p99": "p99_s", "CPU": "cpu_s"}[quantity]
    small, large = getattr(before, field), getattr(after, field)
    return (float(small / large) if small > 0 and large > 0 else 0.0,
            before.bound_s / after.bound_s if before.bound_s and after.bound_s else math.inf)


def _p99_s(samples_s: Iterable[float]) -> float:
    return float(np.percentile(list(samples_s), 99))


def _interval(left: list[tuple[float, float]], rng: np.random.Generator) -> tuple[float, float]:
    """Return between what lies what is left of a row by what is left of the possible, which is at most 1."""
    if len(left) < _FEWEST:
        return 0.0, math.inf
    shares, possible = np.median(rng.choice(np.array(left), (_DRAWS, len(left))), axis=1).T
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(shares / np.minimum(possible, 1), [tail, 1 - tail])
    return float(low), float(high)
