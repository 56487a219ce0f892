"""Numbers of perf: the peak against all pairs, percentiles against a sorted list, sums of two directions."""
from __future__ import annotations

import array
import random

import pytest

from bpsfast.tools.perf import results


def brute_force(posted, completed):
    n = len(posted)
    return min((completed[j] - posted[i]) / (j - i + 1) for i in range(n) for j in range(i, n)) / 1e9


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_the_best_of_all_stretches(seed):
    chance = random.Random(seed)
    n, depth = chance.randint(1, 60), chance.randint(1, 8)
    now, posted, completed = chance.randint(0, 10**15), [], []
    while len(completed) < n:
        while len(posted) < n and len(posted) - len(completed) < depth:
            posted.append(now)
        now += chance.choice([1, 10, 1000, 50_000])
        completed += [now] * min(chance.randint(1, depth), len(posted) - len(completed))
    expected = brute_force(posted, completed)
    assert results.peak_seconds(posted, completed) == pytest.approx(expected, rel=1e-6)
    as_bytes = [array.array("q", values).tobytes() for values in (posted, completed)]
    assert results.peak_seconds(*as_bytes) == pytest.approx(expected, rel=1e-6)


def test_without_times_there_is_no_peak():
    assert results.peak_seconds(b"", b"") is None
    row = results.bandwidth(100, 50, 2.0, None)
    assert row == {"messages": 50, "seconds": 2.0, "average_bytes_per_s": 2500.0, "peak_bytes_per_s": None,
                   "messages_per_s": 25.0}


def test_a_peak_is_not_below_the_average():
    assert results.bandwidth(100, 50, 1.0, 1.0)["peak_bytes_per_s"] == 5000.0


def test_two_directions_add_up():
    one, other = results.bandwidth(100, 50, 1.0, 0.01), results.bandwidth(100, 30, 2.0, 0.02)
    both = results.both(one, other)
    assert both["average_bytes_per_s"] == 5000.0 + 1500.0
    assert both["peak_bytes_per_s"] == 10000.0 + 5000.0
    assert both["messages"] == 80 and both["seconds"] == 2.0
    assert results.both(one, results.bandwidth(100, 30, 2.0, None))["peak_bytes_per_s"] is None


def test_latency_leaves_out_the_warm_up_and_halves():
    values = [10**9] * 5 + [2000 * i for i in range(1, 1001)]
    found = results.latency(values, 5, halves=True)
    assert found["min_s"] == pytest.approx(1e-6) and found["max_s"] == pytest.approx(1e-3)
    assert found["typical_s"] == pytest.approx(500.5e-6)
    assert found["p99_s"] == pytest.approx(990e-6) and found["p999_s"] == pytest.approx(999e-6)
    assert results.latency(values, 5, halves=False)["min_s"] == pytest.approx(2e-6)
    with pytest.raises(ValueError, match="no samples"):
        results.latency([1], 1, halves=True)
