"""Curves over sizes have no cliff: no size where the next larger one is slower than 0.8 times per byte.

Where the possible (memory's speed, raw sockets') falls from one size to the next, as where a cache ends, a curve that
falls with it is as good as before: what counts is then how much nearer it was.

Sizes are compared turn by turn, since those of one round were measured within seconds: what a machine is like for
minutes both had, and turns between which its CPUs were moved out of one cache, or into one, are left out. Turns
differ, by where the kernel has put whose threads. So each cliff has an interval, of pairs of turns drawn again, and is
certain if all of it is beyond the limit.
"""
from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpsfast.bench import memory_bound
from bpsfast.doctor.caches import MOST_NS

LEAST_SHARE = 0.8
_CONFIDENCE = 0.95
_DRAWS = 2000
_FEWEST = 3
_OURS = "bpsfast"
#: What has a curve, and the field of a turn that tells it.
_QUANTITIES = (("goodput", "median_s"), ("p99", "p99_s"), ("CPU", "cpu_s"))
#: The row of a job that moves gradients and does not sum them.
SILENT = "numpy, sums off"


class Turn(NamedTuple):
    """One turn of one size: seconds, the 99th percentile's, and CPU seconds of an operation; the best possible time in
    that round (None: nobody knows); how long a cache line took between cores that share a cache (0: nobody knows).
    """

    median_s: float
    p99_s: float
    cpu_s: float
    bound_s: float | None = None
    handover_ns: float = 0.0


class Point(NamedTuple):
    """One size of a curve, of all its turns; `turns` are empty where they are not known.

    The percentile is that of the median turn: what else the machine did in one turn is no cliff of ours.
    """

    nbytes: int
    whole: Turn
    turns: tuple[Turn, ...] = ()


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
        if ours and (chosen.get("contestant") != _OURS or not has_sums(name)):
            continue
        nodes = f", {chosen['n_nodes']} nodes" if chosen.get("n_nodes", 1) > 1 else ""
        bound, turns = measured.get("bound"), _turns(chosen, measured)
        p99_s = statistics.median(turn.p99_s for turn in turns) if turns else float(measured["p99_s"])
        whole = Turn(measured["median_s"], p99_s, statistics.median(measured["cpu_s"]),
                     chosen["nbytes"] / bound if bound else None)
        found.setdefault(f"{record['section']}: {name}{nodes}", {})[chosen["nbytes"]] = Point(
            chosen["nbytes"], whole, turns)
    return {name: [points[nbytes] for nbytes in sorted(points)] for name, points in found.items() if len(points) > 1}


def has_sums(operation: str) -> bool:
    """Tell whether a row of ours called so is an exchange whose sums are checked."""
    return operation != SILENT and not operation.startswith(memory_bound.PREFIX)


def _turns(chosen: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[Turn, ...]:
    samples, n, cpu_s = measured.get("samples_s", ()), chosen.get("n_per_round", 0), measured["cpu_s"]
    if not samples or not n or len(samples) != n * len(cpu_s):
        return ()
    medians_s, p99_s = np.percentile(np.reshape(samples, (-1, n)), [50, 99], axis=1)
    beside = itertools.zip_longest(measured.get("bound_s", ()), measured.get("handover_ns", ()))
    return tuple(Turn(*times, bound_s, ns or 0.0) for times, (bound_s, ns) in zip(
        zip(medians_s.tolist(), p99_s.tolist(), cpu_s), itertools.chain(beside, itertools.repeat((None, 0.0)))))


def cliffs(found: Mapping[str, list[Point]]) -> list[Cliff]:
    """Return every step to the next size after which goodput, latency or CPU per byte is worse than allowed.

    Those that the possible does not explain are `Cliff.is_ours`. The same curves give the same intervals.
    """
    rng = np.random.default_rng(0)
    steps = []
    for name, points in found.items():
        for before, after in itertools.pairwise(points):
            pairs, grown = _pairs(before, after), after.nbytes / before.nbytes
            is_known, possible = bool(before.turns and after.turns), [grown * _possible(*pair) for pair in pairs]
            for quantity, field in _QUANTITIES:
                shares = [grown * getattr(small, field) / getattr(large, field) for small, large in pairs
                          if getattr(large, field) > 0]
                if len(shares) == len(pairs) and (share := statistics.median(shares)) < LEAST_SHARE:
                    most = min(1.0, statistics.median(possible))
                    low, high = _interval(shares, possible, rng) if is_known else (share / most, share / most)
                    steps.append(Cliff(name, quantity, before.nbytes, after.nbytes, share, most, low * most,
                                       high * most))
    return steps


def _pairs(before: Point, after: Point) -> list[tuple[Turn, Turn]]:
    """Return turns of one round each; where there are none that can be compared, both points as a whole."""
    found = [(small, large) for small, large in zip(before.turns, after.turns)
             if not small.handover_ns or not large.handover_ns
             or (small.handover_ns <= MOST_NS) == (large.handover_ns <= MOST_NS)]
    return found or [(before.whole, after.whole)]


def _possible(small: Turn, large: Turn) -> float:
    return small.bound_s / large.bound_s if small.bound_s and large.bound_s else math.inf


def _interval(shares: list[float], possible: list[float], rng: np.random.Generator) -> tuple[float, float]:
    """Return between what lies what is left by what is left of the possible."""
    if len(shares) < _FEWEST:
        return 0.0, math.inf
    draws = rng.integers(len(shares), size=(_DRAWS, len(shares)))
    left = np.median(np.array(shares)[draws], axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(left / np.minimum(1.0, np.median(np.array(possible)[draws], axis=1)), [tail, 1 - tail])
    return float(low), float(high)
