"""Another machine's clock: the truth is within the uncertainty, however lopsided the way and whatever the drift."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.clock_offset import DRIFT, ClockOffset, Point, offset_at

SECOND = 1_000_000_000


@settings(deadline=None)
@given(offset_ns=st.integers(-10**15, 10**15), drift_ppm=st.floats(-50, 50), start_ns=st.integers(0, 10**15),
       rounds=st.lists(st.tuples(st.floats(0.001, 400), st.integers(0, 10**8), st.integers(0, 10**8)), min_size=1,
                       max_size=150),
       looks=st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=10))
def test_the_truth_is_within_the_uncertainty(offset_ns, drift_ppm, start_ns, rounds, looks):
    def ahead_ns(at_ns: int) -> float:
        return offset_ns + drift_ppm * 1e-6 * (at_ns - start_ns)

    clock, now_ns = ClockOffset(), start_ns
    for pause_s, there_ns, back_ns in rounds:
        now_ns += round(pause_s * SECOND)
        read_ns = now_ns + there_ns
        clock.sample(now_ns, read_ns + round(ahead_ns(read_ns)), read_ns + back_ns)
        now_ns = read_ns + back_ns
    for look in looks:
        at_ns = round(start_ns + look * (now_ns - start_ns))
        found_ns, uncertainty_ns = offset_at(clock.points, at_ns)
        # what drifts during one round trip is part of the sample: at most 100 ms here
        slack_ns = abs(drift_ppm) * 1e-6 * 2e8 + 4
        assert abs(found_ns - ahead_ns(at_ns)) <= uncertainty_ns + slack_ns


def test_the_shortest_round_trip_of_a_stretch_counts():
    clock = ClockOffset()
    for sent_ns, there_ns, received_ns in ((0, 5_000, 9_000), (10_000, 5_500, 10_400), (20_000, 29_000, 24_000)):
        clock.sample(sent_ns, there_ns, received_ns)
    assert clock.points == (Point(10_200, -4_700, 208),)


def test_a_long_job_keeps_few_points_and_still_sees_the_drift():
    clock = ClockOffset()
    for second in range(20_000):
        clock.sample(second * SECOND, second * SECOND + second * 1000, second * SECOND + 200)
    assert clock.n_samples == 20_000 and 32 <= len(clock.points) <= 64
    offset_ns, uncertainty_ns = offset_at(clock.points, 10_000 * SECOND)
    assert offset_ns == pytest.approx(10_000_000, abs=200) and uncertainty_ns < 200


def test_beyond_the_samples_the_uncertainty_grows():
    points = (Point(1000, 7, 3),)
    assert offset_at(points, 1000) == (7, 3)
    assert offset_at(points, 1000 + SECOND) == offset_at(points, 1000 - SECOND) == (7, 3 + round(DRIFT * SECOND))


@pytest.mark.parametrize("times", [(10, 5, 9), (-5, 0, 3)])
def test_an_answer_from_before_its_question_counts_for_nothing(times):
    clock = ClockOffset()
    clock.sample(*times)
    assert clock.points == () and clock.n_samples == 0
