"""Barriers by sequence number."""
from __future__ import annotations

from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.job.rank_queries import Barriers


def test_the_last_one_opens_it_once():
    ours = Barriers(2)
    assert not ours.enter(0, 1) and not ours.enter(0, 1) and ours.missing(1) == [1]
    assert ours.enter(1, 1)
    assert not ours.enter(1, 1) and ours.missing(1) == [] and ours.missing(2) == [0, 1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60))
def test_barriers_open_in_order_when_all_are_in(steps):
    ours = Barriers(3)
    at = [0, 0, 0]  # barriers that each rank has entered
    opened = 0
    for rank in steps:
        if at[rank] > opened:
            continue  # it waits
        at[rank] += 1
        if ours.enter(rank, at[rank]):
            opened += 1
        assert opened == min(at)
        assert ours.missing(opened + 1) == [r for r in range(3) if at[r] <= opened]
