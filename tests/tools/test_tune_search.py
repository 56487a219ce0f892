"""The search as a pure function: a response that is known, noise with a seed, a clock that only measuring moves."""
from __future__ import annotations

import random

import pytest
from hypothesis import given, settings as limits, strategies as st

from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.tune.search import ConfigRefusedError, Search, Tunable, describe

KNOBS = (Tunable("a", (1, 2, 4, 8), "bw"), Tunable("b", (0, 1), "bw"), Tunable("c", (10, 20, 30), "lat"))
START = {"a": 1, "b": 0, "c": 10}
COST_S = 0.5


class Bench:
    """A machine whose response is the product of one factor for each value, with noise and perhaps a drift."""

    def __init__(self, factors, noise, seed, drift=0.0, cost_s=COST_S):
        self.factors, self.noise, self.drift, self.cost_s = factors, noise, drift, cost_s
        self.now_s = 1000.0
        self.rng = random.Random(seed)
        self.asked = []

    def measure(self, config, load):
        self.asked.append(dict(config))
        self.now_s += self.cost_s
        value = 1e9 * (1 + self.drift * (self.now_s - 1000.0))
        for (name, chosen, where), factor in self.factors.items():
            if config[name] == chosen and where == load:
                value *= factor
        return value * self.rng.lognormvariate(0, self.noise)

    def search(self, budget_s=600.0, seed=1, knobs=KNOBS, measure=None):
        return Search(START, knobs, ("bw", "lat"), measure or self.measure, clock=lambda: self.now_s,
                      budget_s=budget_s, rng=random.Random(seed),
                      effective=lambda config, load: tuple(sorted(config.items())))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drift", [0.0, 0.002])
def test_the_optimum_of_a_separable_response_is_found(seed, drift):
    bench = Bench({("a", 4, "bw"): 1.4, ("a", 2, "bw"): 1.2, ("a", 8, "bw"): 0.7, ("b", 1, "bw"): 1.15,
                   ("c", 30, "lat"): 1.3}, 0.02, seed, drift)
    found = bench.search(seed=seed).run()
    assert found.changed and found.best == {"a": 4, "b": 1, "c": 30}, found.steps
    assert found.comparisons["bw"].verdict == found.comparisons["lat"].verdict == "better"
    assert found.comparisons["bw"].gain == pytest.approx(1.4 * 1.15 - 1, abs=0.15)
    assert describe(found.best, found.start) == found.best
    assert not found.untried


def test_pure_noise_changes_nothing():
    changed = [seed for seed in range(60) if Bench({}, 0.05, seed).search(seed=seed).run().changed]
    assert not changed


@given(st.integers(0, 2**32), st.floats(0.001, 0.3))
@limits(max_examples=40, deadline=None)
def test_a_value_that_is_much_worse_is_never_taken(seed, noise):
    bench = Bench({("a", value, "bw"): 0.25 for value in (2, 4, 8)}, noise, seed)
    assert bench.search(seed=seed).run().best["a"] == 1


@given(st.integers(0, 2**32), st.floats(20, 400), st.floats(0.05, 2.0))
@limits(max_examples=60, deadline=None)
def test_the_budget_is_kept(seed, budget_s, cost_s):
    bench = Bench({("a", 4, "bw"): 1.4, ("b", 1, "bw"): 1.2}, 0.05, seed, cost_s=cost_s)
    search = bench.search(budget_s, seed)
    try:
        found = search.run()
    except ConfigError as exc:
        assert "nothing was changed" in str(exc) and bench.now_s - 1000 <= 3 * cost_s
    else:
        assert found.seconds == pytest.approx(bench.now_s - 1000)
        assert found.seconds <= budget_s + 1e-6
        assert found.n_measured == len(bench.asked)


def test_a_budget_that_ends_in_the_middle_names_the_knobs_that_were_not_tried():
    bench = Bench({}, 0.02, 3)
    found = bench.search(budget_s=30.0).run()
    assert found.untried and {step.knob for step in found.steps}.isdisjoint(found.untried)


def test_a_budget_too_short_for_anything_is_an_error():
    with pytest.raises(ConfigError, match=r"--budget 5s is too short: .*, 6 rounds each for bw, lat"):
        Bench({}, 0.02, 3).search(budget_s=5.0).run()


def test_what_cannot_be_is_told_and_left_out():
    bench = Bench({("a", 4, "bw"): 2.0, ("b", 1, "bw"): 1.2}, 0.01, 5)

    def measure(config, load):
        if config["a"] == 4:
            raise ConfigRefusedError("the device has no room")
        return bench.measure(config, load)

    found = bench.search(measure=measure).run()
    assert found.best["a"] != 4 and found.best["b"] == 1
    assert [step.words for step in found.steps if step.value == 4] == ["not possible: the device has no room"]


def test_what_was_found_and_is_refused_in_the_end_changes_nothing():
    bench = Bench({("a", 4, "bw"): 2.0}, 0.01, 5)

    def measure(config, load):
        if config["a"] == 4 and any(step.taken and step.value == 4 for step in search.outcome.steps):
            raise ConfigRefusedError("somebody took the room")
        return bench.measure(config, load)

    search = bench.search(measure=measure)
    found = search.run()
    assert not found.changed and found.best == START and set(found.before) == {"bw", "lat"} and not found.after
    assert found.words == "the found settings are not possible any more: somebody took the room"


def test_the_error_of_a_measurement_ends_the_search():
    def measure(config, load):
        raise OSError("the peer is gone")

    with pytest.raises(OSError, match="the peer is gone"):
        Bench({}, 0.0, 1).search(measure=measure).run()


def test_what_helps_one_load_and_harms_another_is_not_kept():
    bench = Bench({("b", 1, "bw"): 1.3, ("b", 1, "lat"): 0.7}, 0.01, 7)
    found = bench.search().run()
    assert not found.changed and found.best == START and "make lat worse" in found.words
    assert found.comparisons["bw"].verdict == "better" and found.comparisons["lat"].verdict == "worse"


def test_values_that_make_no_difference_are_not_measured():
    bench = Bench({}, 0.01, 1)
    search = Search(START, KNOBS, ("bw", "lat"), bench.measure, clock=lambda: bench.now_s, budget_s=600.0,
                    rng=random.Random(1), effective=lambda config, load: config["b"])
    search.run()
    assert {(config["a"], config["c"]) for config in bench.asked} == {(1, 10)}


def test_values_that_fall_behind_are_given_up_early():
    bench = Bench({("a", value, "bw"): 0.5 for value in (2, 4, 8)}, 0.01, 1)
    found = bench.search().run()
    assert all("dropped early" in step.words for step in found.steps if step.knob == "a")
    assert sum(config["a"] == 8 for config in bench.asked) == 2
