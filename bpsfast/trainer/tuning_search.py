"""Chooses the next settings that autotune tries, by Bayesian optimisation of step times on a grid. Pure.

Logarithms of step times are described by the expectation that was given, plus a Gaussian process (squared exponential,
one length for all directions: factors of two of partition, fusion, credit and streams). What is tried next is the
neighbour of something tried that promises the largest improvement (Mockus 1978; Jones et al. 1998), but nothing that is
expected to take 1.5 times the best. Own code, forty lines of NumPy: a rank's process should not load SciPy or
scikit-learn for the thirty points of a search.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..orchestration.placement.shares import Machine, least_time_s

#: More partitions than this under way to one peer make no difference.
_MOST = 256.0
#: Cost of a write per partition and peer on a busy machine: a node decides on every write in Python.
_WRITE_S = 40e-6
#: Powers of two around the settings' defaults.
PARTITIONS = tuple(64_000 << i for i in range(11))
FUSIONS = tuple(64_000 << 2 * i for i in range(5))
CREDITS = tuple(1 << i for i in range(9))
STREAMS = (1, 2, 4)
#: Spread of ln(step time) of one measurement; correlation length of points, in factors of two.
_NOISE, _LENGTH = 0.02, 2.0
#: Spread of ln(step time) over the grid: least and most; from this many measurements on, twice the measured spread.
_LEAST_SPREAD, _MOST_SPREAD, _ENOUGH = 0.02, 0.3, 9
#: Steps that are expected to take longer than this many times the best are not tried.
DARING = 1.5
#: The search ends below this expected improvement, a share of the best step time.
WORTHWHILE = 0.01


class TuningPoint(NamedTuple):
    """Most bytes of a partition, of a fused unit, and under way to one peer; TCP connections to a peer."""

    partition_nbytes: int
    fusion_nbytes: int
    credit_nbytes: int
    n_streams: int

    @property
    def layout(self) -> tuple[int, int, int]:
        """The values whose change needs another layout of the gradients."""
        return self.partition_nbytes, self.fusion_nbytes, self.n_streams

    @property
    def coordinates(self) -> tuple[float, ...]:
        """Its coordinates for the search: log2 of partition, of fusion, of credit in partitions; half of log2 of
        streams, which mostly matter least.
        """
        return (math.log2(self.partition_nbytes), math.log2(max(1, self.fusion_nbytes)),
                math.log2(min(max(1.0, self.credit_nbytes / self.partition_nbytes), _MOST)),
                math.log2(self.n_streams) / 2)

    def __str__(self) -> str:
        return (f"partitions of {_short(self.partition_nbytes)}, fusion {_short(self.fusion_nbytes)}, credit "
                f"{_short(self.credit_nbytes)}, {self.n_streams} streams")


def _short(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 10**6 else f"{nbytes / 1e3:.3g} KB"


def expectation(machines: Sequence[Machine], sizes: Sequence[int]) -> Callable[[TuningPoint], float]:
    """Return a function: the relative step time that the planner expects at a point, for tensors of *sizes* bytes.

    If not all rates of *machines* are known, it is 1.0 everywhere. Only proportions count: the time on the wire of the
    optimum (`orchestration.placement.shares`), one partition at either end, and a cost for each write (ByteScheduler,
    SOSP'19, section 4).
    """
    if not all(machine.rate > 0 for machine in machines) or len(machines) < 2 or not any(sizes):
        return lambda point: 1.0
    wire_s = least_time_s(machines, sum(sizes))
    rate = min(machine.rate for machine in machines)
    n_peers = len(machines) - 1

    def expected(point: TuningPoint) -> float:
        fused = sum(nbytes for nbytes in sizes if nbytes < point.fusion_nbytes)
        n_units = math.ceil(fused / max(1, point.fusion_nbytes))
        n_parts = n_units + sum(math.ceil(nbytes / point.partition_nbytes) for nbytes in sizes
                                if nbytes >= point.fusion_nbytes)
        grain = min(point.partition_nbytes, max(sizes))
        return wire_s + 2 * grain / rate + n_parts * n_peers * _WRITE_S

    return expected


class Search:
    """Measured points, and what to try next.

    *expect*: the relative step time that a model expects at a point. Measurements overrule it. *streams*: numbers of
    streams that may be tried.
    """

    def __init__(self, expect: Callable[[TuningPoint], float] = lambda point: 1.0,
                 streams: Sequence[int] = STREAMS) -> None:
        self._expect = expect
        self._grid = [TuningPoint(p, f, p * c, n)
                      for p in PARTITIONS for f in FUSIONS for c in CREDITS for n in streams]
        self._refused: set[TuningPoint] = set()
        self.measured: dict[TuningPoint, float] = {}

    def tell(self, point: TuningPoint, step_s: float) -> None:
        """Note that a step takes *step_s* seconds at *point*."""
        self.measured[point] = step_s

    def refuse(self, point: TuningPoint) -> None:
        """Note that *point* is not possible: its partition and fusion sizes are not proposed again."""
        self._refused |= {each for each in self._grid if each[:2] == point[:2]}

    @property
    def best(self) -> TuningPoint:
        """The point with the shortest step of those measured, the first of equals. ValueError if there is none."""
        return min(self.measured, key=lambda point: self.measured[point])

    def propose(self) -> tuple[TuningPoint, float] | None:
        """Return the next point and its expected improvement (0.02: 2 %); None: nothing is worthwhile."""
        best_s = self.measured[self.best]
        candidates = [point for point in self._reachable() if point not in self.measured]
        if not candidates:
            return None
        mean, deviation = self._predict(candidates)
        gain = math.log(best_s) - mean
        allowed = gain > -math.log(DARING)
        improvement = np.where(allowed, _expected_improvement(gain, deviation), 0.0)
        chosen = int(np.argmax(improvement))
        if improvement[chosen] < WORTHWHILE:
            unknown = [i for i, point in enumerate(candidates) if allowed[i] and self._is_new_direction(point)]
            if not unknown:
                return None
            chosen = max(unknown, key=lambda i: improvement[i])
        return candidates[chosen], float(improvement[chosen])

    def _is_new_direction(self, point: TuningPoint) -> bool:
        """Whether *point* lies from the best along one axis only, where nothing within reach was measured that way.

        A description that is mostly of other directions says little of this one.
        """
        best = np.array(self.best.coordinates)
        way = np.array(point.coordinates) - best
        axis = int(np.argmax(np.abs(way)))
        if (np.delete(np.abs(way), axis) > 0.1).any() or not abs(way[axis]) > 0.1:
            return False
        tried = np.array([other.coordinates for other in self.measured]) - best
        along = (np.delete(np.abs(tried), axis, axis=1) <= 0.1).all(axis=1)
        known = along & (tried[:, axis] * way[axis] > 0) & (np.abs(tried[:, axis]) <= 2.1)
        return not known.any()

    def _reachable(self) -> list[TuningPoint]:
        """Points of the grid at most two factors of two (fusion: one of four) beside what did well."""
        good_s = self.measured[self.best] * 1.15
        places = np.array([point.coordinates for point, step_s in self.measured.items() if step_s <= good_s])
        grid = [point for point in self._grid if point not in self._refused]
        if not grid:
            return []
        apart = np.abs(np.array([point.coordinates for point in grid])[:, None, :] - places[None, :, :])
        near = (apart <= 2.1).all(axis=2) & ((apart > 0.6).sum(axis=2) <= 2)
        return [point for point, is_near in zip(grid, near.any(axis=1)) if is_near]

    def _predict(self, points: Iterable[TuningPoint]) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and deviation of ln(step time) at *points*."""
        tried, asked = list(self.measured), list(points)
        here = np.log([self._expect(point) for point in tried])
        residual = np.log([self.measured[point] for point in tried]) - here
        level = float(np.median(residual))
        spread = _MOST_SPREAD
        if len(tried) >= _ENOUGH:
            spread = float(np.clip(2 * np.std(residual), _LEAST_SPREAD, _MOST_SPREAD))
        known = spread**2 * _likeness(tried, tried) + _NOISE**2 * np.eye(len(tried))
        cross = spread**2 * _likeness(asked, tried)
        weights = np.linalg.solve(known, residual - level)
        mean = np.log([self._expect(point) for point in asked]) + level + cross @ weights
        variance = spread**2 - np.einsum("ij,ji->i", cross, np.linalg.solve(known, cross.T))
        return mean, np.sqrt(np.maximum(variance, 1e-12))


def _likeness(a: list[TuningPoint], b: list[TuningPoint]) -> np.ndarray:
    x, y = np.array([point.coordinates for point in a]), np.array([point.coordinates for point in b])
    squares = ((x[:, None, :] - y[None, :, :]) ** 2).sum(axis=2)
    return np.exp(-squares / (2 * _LENGTH**2))


def _expected_improvement(gain: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    z = gain / deviation
    below = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in z])
    return gain * below + deviation * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
