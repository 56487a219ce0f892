"""Whether one series of measurements is better than another by more than chance.

Both were taken in turns, so what drifts (a neighbour's traffic, temperature) hits both alike and their ratios, pair by
pair, hardly see it. Medians, because a machine that is disturbed once must not decide.
"""
from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: What is not worth a setting, however sure: one per cent.
LEAST_GAIN = 0.01
#: How many standard errors of the median a gain has to exceed.
_ERRORS = 3.0
#: Standard deviation of normal values over their median absolute deviation; error of a median over that of a mean.
_PER_MAD, _PER_MEAN = 1.4826, 1.2533


@dataclass(frozen=True)
class Comparison:
    """`gain` is relative, 0.1 for a tenth better, `noise` its standard error; `n` pairs."""

    gain: float
    noise: float
    n: int
    verdict: str  # "better", "worse" or "same"

    def __str__(self) -> str:
        return f"{100 * self.gain:+.1f} % (noise {100 * self.noise:.1f} %)"


def compare(before: Sequence[float], after: Sequence[float], noise: float = 0.0) -> Comparison:
    """Compare values that are better the higher they are, all above 0, taken in turns.

    A difference counts if it is more than one per cent and three standard errors, and nearly every pair agrees on its
    sign. *noise*: standard deviation of one value, relative, as known from elsewhere: few pairs may agree by accident.
    """
    ratios = [math.log(new / old) for old, new in zip(before, after)]
    n = len(ratios)
    if n < 1:
        raise ValueError("no pairs to compare")
    middle = statistics.median(ratios)
    error = _PER_MEAN * max(spread(ratios), noise * math.sqrt(2)) / math.sqrt(n)
    dissent = sum(ratio * middle <= 0 for ratio in ratios)
    clear = abs(middle) > max(math.log1p(LEAST_GAIN), _ERRORS * error) and dissent <= n // 8
    verdict = "same" if not clear else "better" if middle > 0 else "worse"
    return Comparison(math.expm1(middle), error, n, verdict)


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation as the median absolute deviation tells it: outliers hardly count."""
    middle = statistics.median(values)
    return _PER_MAD * statistics.median(abs(value - middle) for value in values)


def noise_of(values: Sequence[float]) -> float:
    """Return the relative standard deviation of one value, of a series in which nothing was changed; drift left out."""
    steps = [math.log(new / old) for old, new in itertools.pairwise(values)]
    if not steps:
        return 0.0
    return max(spread(steps), _PER_MAD * statistics.median(map(abs, steps))) / math.sqrt(2)
