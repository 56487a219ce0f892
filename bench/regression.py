"""Compares two runs of one benchmark: the factor by which the second is slower, and how certain that is.

The factor is that of the medians, with a bootstrap confidence interval. Samples of one turn are alike, so whole turns
are drawn, and fewer than three of them show nothing, however many samples each has; single samples are drawn where
turns are not known. The interval does not include load of other programs that only one of the runs had.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bpsfast.bench.harness.result_file import ResultFile, Series
from bpsfast.orchestration.errors import ConfigError

FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "the same", "unclear"
_FEWEST = 3
_DRAWS = 1000
_MOST_NUMBERS = 1 << 18  # drawn at once
_MACHINE = ("cpu", "architecture", "n_threads")


@dataclass(frozen=True)
class Row:
    """One row of both runs: medians in seconds, their ratio (2: the second takes twice as long), its interval."""

    name: str
    before_s: float
    after_s: float
    ratio: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class Regression:
    """All rows that both runs have, and the names of those that only one has."""

    rows: tuple[Row, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        """Return this for JSON."""
        return asdict(self)


def check(before: ResultFile, after: ResultFile, any_bench: bool, any_machine: bool) -> None:
    """Raise `ConfigError` where two runs cannot be compared, with the reason and the option that allows it."""
    if before.bench != after.bench and not any_bench:
        raise ConfigError(f"{before.path} is of bench {before.bench}, {after.path} of {after.bench}: their rows are "
                          "not of the same thing; --any-bench compares those whose names agree")
    other = [f"{name} {before.machine.get(name)!r} and {after.machine.get(name)!r}" for name in _MACHINE
             if before.machine.get(name) != after.machine.get(name)]
    if other and not any_machine:
        raise ConfigError(f"{before.path} and {after.path} are of two machines ({'; '.join(other)}): a difference "
                          "would say nothing of the code; --any-machine compares them")


def compare(before: Mapping[str, Series], after: Mapping[str, Series], confidence: float = 0.95,
            threshold: float = 0.05, seed: int = 0) -> Regression:
    """Return the rows of both runs, with intervals of *confidence*.

    Changes up to the share *threshold* are ignored: with 0.05 factors from 1/1.05 to 1.05. The same *seed* gives the
    same intervals. Raises `ConfigError` if no row is in both runs, or an option makes no sense.
    """
    if not 0 < confidence < 1 or threshold < 0:
        raise ConfigError(f"confidence {confidence:g} and threshold {threshold:g}: expected a share between 0 and 1, "
                          "and 0 or more")
    names = [name for name in before if name in after]
    if not names:
        raise ConfigError("the two runs have no row in common, such as "
                          f"{next(iter(before))!r} in the first and {next(iter(after))!r} in the second")
    rng = np.random.default_rng(seed)
    rows = [_row(name, before[name], after[name], confidence, threshold, rng) for name in names]
    return Regression(tuple(rows), tuple(name for name in before if name not in after),
                      tuple(name for name in after if name not in before))


def _row(name: str, before: Series, after: Series, confidence: float, threshold: float,
         rng: np.random.Generator) -> Row:
    first, second = (float(np.median(series.samples_s)) for series in (before, after))
    ratio = second / first
    if min(len(_turns(before)), len(_turns(after))) < _FEWEST:
        return Row(name, first, second, ratio, 0.0, float("inf"), UNCLEAR)
    ratios = _medians(after, rng) / _medians(before, rng)
    tail = (1 - confidence) / 2
    low, high = (float(value) for value in np.quantile(ratios, [tail, 1 - tail]))
    return Row(name, first, second, ratio, low, high, verdict(low, high, threshold))


def verdict(low: float, high: float, threshold: float) -> str:
    """Return what an interval of the ratio shows: "unclear" where it contains both a change and no change."""
    most = 1 + threshold
    if low > most:
        return SLOWER
    if high < 1 / most:
        return FASTER
    return SAME if 1 / most <= low and high <= most else UNCLEAR


def _medians(series: Series, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return the medians of `_DRAWS` runs drawn from this one."""
    turns = _turns(series)
    found = np.empty(_DRAWS)
    at_once = max(1, _MOST_NUMBERS // turns.size)
    for at in range(0, _DRAWS, at_once):
        drawn = turns[rng.integers(0, len(turns), (min(at_once, _DRAWS - at), len(turns)))]
        found[at : at + len(drawn)] = np.median(drawn.reshape(len(drawn), -1), axis=1)
    return found


def _turns(series: Series) -> np.ndarray[Any, Any]:
    """Return the units that are drawn: a row for each turn, or for each sample where turns are not known."""
    samples = np.array(series.samples_s)
    return samples.reshape(-1, 1 if len(samples) % series.n_per_round else series.n_per_round)
