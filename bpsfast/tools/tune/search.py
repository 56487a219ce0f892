"""For ``bpsfast tune rdma``: searches for better settings, one by one, within a time budget and against noise.

The values of a tunable are measured in rounds together with the current settings, in random order. Values that fall
behind are dropped early. The best one is accepted only if it wins a second series by more than the noise, because the
winner of several looks better than it is. At the end the initial and the found settings are compared once more; only
that decides.

The module does not know what is measured: a function measures, and a clock is passed in.
"""
from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...orchestration.errors import ConfigError

#: Smallest relative gain that counts.
LEAST_GAIN = 0.01
#: Number of standard errors of the median that a gain must exceed.
_ERRORS = 3.0
#: Standard deviation of normal values over their median absolute deviation; error of a median over that of a mean.
_PER_MAD, _PER_MEAN = 1.4826, 1.2533


@dataclass(frozen=True)
class Comparison:
    """The comparison of two series: relative `gain` (0.1 is a tenth better), its standard error `noise`, `n` pairs."""

    gain: float
    noise: float
    n: int
    verdict: str  # "better", "worse" or "same"

    def __str__(self) -> str:
        return f"{100 * self.gain:+.1f} % (noise {100 * self.noise:.1f} %)"


def compare(before: Sequence[float], after: Sequence[float], noise: float = 0.0) -> Comparison:
    """Compare positive values, higher is better, measured in alternation.

    A difference counts if it exceeds one per cent and three standard errors, and nearly all pairs agree on its sign.
    Alternation and ratios cancel drift; medians ignore single disturbances. *noise*: known relative standard deviation
    of one value, because few pairs may agree by accident.
    """
    ratios = [math.log(new) - math.log(old) for old, new in zip(before, after)]  # turned around: exactly the opposite
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
    """Return the standard deviation estimated by the median absolute deviation, which ignores outliers."""
    middle = statistics.median(values)
    return _PER_MAD * statistics.median(abs(value - middle) for value in values)


def noise_of(values: Sequence[float]) -> float:
    """Return the relative standard deviation of one value, from a series without changes; drift is excluded."""
    steps = [math.log(new / old) for old, new in itertools.pairwise(values)]
    if not steps:
        return 0.0
    return max(spread(steps), _PER_MAD * statistics.median(map(abs, steps))) / math.sqrt(2)

_NOISE_SAMPLES = 6
_ROUNDS, _LEAST_ROUNDS = 4, 2
_CONFIRM_PAIRS = 6
_FINAL_PAIRS = 6
_PASSES = 3

Config = dict[str, Any]
#: (settings, load) -> a value, higher is better; raises `ConfigRefusedError`.
Measure = Callable[[Config, str], float]


class ConfigRefusedError(Exception):
    """The settings cannot be measured, and the message says why. The search continues without them."""


class Tunable(NamedTuple):
    """A setting, the values to try beside the current one, and the load for comparisons."""

    name: str
    values: tuple[Any, ...]
    load: str


class TuneStep(NamedTuple):
    """One value that was tried: `was` is the value it was compared with, `words` the result."""

    knob: str
    value: Any
    was: Any
    taken: bool
    words: str


@dataclass
class Outcome:
    """The result. `best` equals `start` unless `changed`; `after` is empty if nothing looked better.

    `before`, `after`: values by load, measured in alternation. `untried`: tunables that the budget did not cover.
    """

    start: Config
    best: Config
    changed: bool = False
    words: str = ""
    steps: list[TuneStep] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    noise: dict[str, float] = field(default_factory=dict)
    before: dict[str, list[float]] = field(default_factory=dict)
    after: dict[str, list[float]] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    n_measured: int = 0
    seconds: float = 0.0


class Search:
    """One search. Owner thread.

    *loads* are measured at the end; they include those of the tunables. *effective* returns a hashable for what
    differs in effect between settings; values without effect are skipped.
    """

    def __init__(self, start: Config, tunables: Sequence[Tunable], loads: Sequence[str], measure: Measure, *,
                 clock: Callable[[], float], budget_s: float, rng: random.Random,
                 effective: Callable[[Config, str], Any],
                 report: Callable[[TuneStep], None] = lambda step: None) -> None:
        self._tunables, self._loads, self._measure = list(tunables), tuple(loads), measure
        self._clock, self._budget_s, self._rng, self._effective = clock, budget_s, rng, effective
        self._report = report
        self._cost: dict[str, float] = {}
        self._config = dict(start)
        self._known: set[Any] = set()
        self.outcome = Outcome(dict(start), dict(start))

    def run(self) -> Outcome:
        """Search, and return the result.

        Raises `ConfigError` if the budget does not suffice to measure the initial settings, and any error of *measure*
        but `ConfigRefusedError`; for the initial settings that one, too.
        """
        self._began = self._clock()
        for load in self._loads:
            self._take(self._config, load)  # includes one-time costs of both sides
        self._require_budget()
        for load in dict.fromkeys(tunable.load for tunable in self._tunables):
            series = [self._take(self._config, load) for _ in range(_NOISE_SAMPLES)]
            self.outcome.noise[load] = noise_of(series)
        try:
            for _ in range(_PASSES):
                self._rng.shuffle(self._tunables)
                if not any([self._turn(tunable) for tunable in self._tunables]):
                    break
            self._finish()
        except ConfigRefusedError as exc:
            if self._config == self.outcome.start:
                raise
            self._config = dict(self.outcome.start)
            for measured in (self.outcome.before, self.outcome.after, self.outcome.comparisons):
                measured.clear()
            self._finish()
            self.outcome.words = f"the found settings are not possible any more: {exc}"
        self.outcome.seconds = self._clock() - self._began
        return self.outcome

    # -- measuring within the budget ----------------------------------------------------------------------------

    def _take(self, config: Config, load: str) -> float:
        before_s = self._clock()
        value = self._measure(dict(config), load)
        self._cost[load] = max(self._clock() - before_s, 0.8 * self._cost.get(load, 0.0))
        self.outcome.n_measured += 1
        if not value > 0:
            raise ConfigRefusedError(f"{load} gave {value}")
        return value

    @property
    def _reserve_s(self) -> float:
        return 2 * _FINAL_PAIRS * sum(self._cost.values())

    def _affords(self, n: int, load: str) -> bool:
        return self._clock() - self._began + n * self._cost[load] + self._reserve_s <= self._budget_s

    def _require_budget(self) -> None:
        noise_s = _NOISE_SAMPLES * sum(self._cost[load] for load in {tunable.load for tunable in self._tunables})
        least_s = self._clock() - self._began + self._reserve_s + noise_s
        if least_s > self._budget_s:
            raise ConfigError(f"--budget {self._budget_s:g}s is too short: the final comparison alone, {_FINAL_PAIRS} "
                              f"rounds each for {', '.join(self._loads)}, take {least_s:.0f} s here; nothing was "
                              "changed")

    # -- one tunable --------------------------------------------------------------------------------------------

    def _turn(self, tunable: Tunable) -> bool:
        """Try the values of a tunable; tell whether one was accepted."""
        present, effect = self._config[tunable.name], self._effective(self._config, tunable.load)
        live: dict[Any, list[float]] = {}
        for value in tunable.values:
            seen = self._effective(self._with(tunable, value), tunable.load)
            if value != present and seen != effect and self._new(seen, tunable.load):
                live[value] = []
        if not live:
            return False
        if not self._affords((len(live) + 1) * _LEAST_ROUNDS + 2 * _CONFIRM_PAIRS, tunable.load):
            if tunable.name not in self.outcome.untried and not any(s.knob == tunable.name for s in self.outcome.steps):
                self.outcome.untried.append(tunable.name)
            return False
        if tunable.name in self.outcome.untried:
            self.outcome.untried.remove(tunable.name)
        own = self._rounds(tunable, live)
        if not live:
            return False
        best = max(live, key=lambda value: _gain(own, live[value]))
        is_gain = _gain(own, live[best]) > LEAST_GAIN
        for value in live:
            if value != best or not is_gain:
                reason = f"less than {best}" if is_gain else "no gain"
                self._tell(tunable, value, False, f"{100 * _gain(own, live[value]):+.1f} %: {reason}")
        return is_gain and self._confirm(tunable, best)

    def _rounds(self, tunable: Tunable, live: dict[Any, list[float]]) -> list[float]:
        """Measure all values and the current one in rounds; drop those that fall behind. Changes *live*."""
        own: list[float] = []
        margin = max(LEAST_GAIN, 2 * self.outcome.noise[tunable.load])
        for number in range(_ROUNDS):
            if number >= _LEAST_ROUNDS and not self._affords(len(live) + 1 + 2 * _CONFIRM_PAIRS, tunable.load):
                break
            order = [*live, None]
            self._rng.shuffle(order)
            for value in order:
                if value is None:
                    own.append(self._take(self._config, tunable.load))
                    continue
                try:
                    live[value].append(self._take(self._with(tunable, value), tunable.load))
                except ConfigRefusedError as exc:
                    del live[value]
                    self._tell(tunable, value, False, f"not possible: {exc}")
            if number + 1 >= _LEAST_ROUNDS:
                for value in [value for value in live if _gain(own, live[value]) < -margin]:
                    self._tell(tunable, value, False, f"{100 * _gain(own, live.pop(value)):+.1f} %: dropped early")
            if not live:
                break
        return own

    def _confirm(self, tunable: Tunable, value: Any) -> bool:
        try:
            own, new = self._pairs(self._config, self._with(tunable, value), tunable.load, _CONFIRM_PAIRS)
        except ConfigRefusedError as exc:
            self._tell(tunable, value, False, f"not possible: {exc}")
            return False
        found = compare(own, new, self.outcome.noise[tunable.load])
        taken = found.verdict == "better"
        self._tell(tunable, value, taken, f"{found}: {'taken' if taken else 'within the noise'}")
        if taken:
            self._config = self._with(tunable, value)
        return taken

    def _pairs(self, one: Config, other: Config, load: str, n: int) -> tuple[list[float], list[float]]:
        """Measure two settings in alternation, in random order."""
        values: tuple[list[float], list[float]] = ([], [])
        for _ in range(n):
            for which in self._rng.sample((0, 1), 2):
                values[which].append(self._take((one, other)[which], load))
        return values

    # -- the end ------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        outcome = self.outcome
        if self._config == outcome.start:
            for load in self._loads:
                outcome.before[load] = [self._take(outcome.start, load) for _ in range(_FINAL_PAIRS)]
            outcome.words = "nothing is better by more than the noise"
            return
        for load in self._loads:
            outcome.before[load], outcome.after[load] = self._pairs(outcome.start, self._config, load, _FINAL_PAIRS)
            outcome.comparisons[load] = compare(outcome.before[load], outcome.after[load],
                                                self.outcome.noise.get(load, 0.0))
        worse = [load for load, found in outcome.comparisons.items() if found.verdict == "worse"]
        # a load that no tunable concerns decides nothing, but must not become worse
        changed = describe(self._config, outcome.start)
        decisive = dict.fromkeys(tunable.load for tunable in self._tunables if tunable.name in changed)
        better = [load for load in decisive if outcome.comparisons[load].verdict == "better"]
        if worse:
            outcome.words = f"the found settings make {', '.join(worse)} worse"
        elif not better:
            outcome.words = "in the final comparison the found settings are not better by more than the noise"
        else:
            outcome.changed, outcome.best = True, dict(self._config)
            outcome.words = f"{', '.join(better)} better by more than the noise, nothing worse"

    def _with(self, tunable: Tunable, value: Any) -> Config:
        return {**self._config, tunable.name: value}

    def _new(self, seen: Any, load: str) -> bool:
        """Tell whether these settings have not been compared with the current ones yet."""
        pair = (self._effective(self._config, load), seen, load)
        if pair in self._known:
            return False
        self._known.add(pair)
        return True

    def _tell(self, tunable: Tunable, value: Any, taken: bool, words: str) -> None:
        step = TuneStep(tunable.name, value, self._config[tunable.name], taken, words)
        self.outcome.steps.append(step)
        self._report(step)


def _gain(own: Sequence[float], values: Sequence[float]) -> float:
    """Return the median gain over the current settings, round by round."""
    return math.expm1(statistics.median(math.log(new / old) for old, new in zip(own, values)))


def describe(config: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from *start*."""
    return {name: value for name, value in config.items() if value != start[name]}
