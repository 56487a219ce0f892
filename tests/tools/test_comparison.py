"""Better, worse or the same: medians of pairs, against their noise and what else is known of it."""
from __future__ import annotations

import random

import pytest
from hypothesis import example, given, strategies as st

from bpsfast.tools.tune.search import compare, noise_of, spread


def test_one_disturbed_pair_does_not_decide():
    before = [100, 101, 99, 100, 101, 100, 99, 100]
    assert compare(before, [1, *(1.1 * value for value in before[1:])]).verdict == "better"
    assert compare(before, [900, *before[1:]]).verdict == "same"


@given(st.lists(st.floats(1.0, 1e9), min_size=1, max_size=9), st.floats(0.5, 2.0))
@example([11.0], 1.01)
def test_a_comparison_turned_around_says_the_opposite(values, factor):
    scaled = [factor * value for value in values]
    one, other = compare(values, scaled), compare(scaled, values)
    opposite = {"better": "worse", "worse": "better", "same": "same"}
    assert other.verdict == opposite[one.verdict]
    assert (1 + one.gain) * (1 + other.gain) == pytest.approx(1)


def test_noise_known_from_elsewhere_keeps_few_pairs_from_agreeing_by_accident():
    before, after = [100.0] * 6, [105.0] * 6
    assert compare(before, after).verdict == "better"
    assert compare(before, after, noise=0.05).verdict == "same"


def test_noise_leaves_out_drift_and_counts_what_jumps():
    assert noise_of([100 * 1.001 ** i for i in range(20)]) < 0.002
    rng = random.Random(2)
    assert noise_of([100 * rng.lognormvariate(0, 0.05) for _ in range(400)]) == pytest.approx(0.05, rel=0.2)
    assert spread([1.0]) == 0 == noise_of([5.0])
    with pytest.raises(ValueError, match="no pairs"):
        compare([], [])
