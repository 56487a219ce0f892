"""The admitted nodes and their names."""
from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bpsfast.orchestration.messages import NodeInfo
from bpsfast.orchestration.roster import Roster, is_majority, may_decide


@pytest.fixture
def roster():
    ranks = [(0, 3), (1,), (), ()]
    return Roster([(b"%d" % i, NodeInfo(index=i, host="abcd"[i], pid=1, address="", shm_name="", ranks=ranks[i],
                                        nic_rate_bytes=0.0)) for i in range(4)])


def test_whose_rank_and_whose_message(roster):
    assert roster.size == 3
    assert [roster.node_of(rank) for rank in (0, 1, 3, 2, -1)] == [0, 1, 0, -1, -1]
    assert roster.index_of(b"2") == 2
    assert roster.senders_of([3, 1, 0]) == [b"0", b"1"]


@pytest.mark.parametrize(("who", "text"), [
    ("rank 3", "rank 3 (node 0, host a)"), ("rank 2", "rank 2"), ("node 0", "node 0 (host a, ranks 0, 3)"),
    ("node 1", "node 1 (host b, rank 1)"), ("node 3", "helper 1 (node 3, host d)"), ("node 4", "node 4"),
    ("rank x", "rank x"), ("", ""), ("the launcher", "the launcher"),
])
def test_names(roster, who, text):
    assert roster.describe(who) == text
    assert Roster(()).describe(who) == who


@given(st.sets(st.integers(0, 40), min_size=1, max_size=12), st.data())
def test_of_two_halves_one_at_most_decides_and_of_all_somebody(workers, data):
    some = data.draw(st.sets(st.sampled_from(sorted(workers))))
    assert not (is_majority(some, workers) and is_majority(workers - some, workers))
    assert is_majority(some, workers) or is_majority(workers - some, workers)
    assert is_majority(workers, workers) and not is_majority(set(), workers)
    assert is_majority(some | {99}, workers) == is_majority(some, workers), "helpers have no vote"


def test_the_dead_count_only_if_nobody_else_is_missing():
    voters = {0, 1, 2, 3}
    assert may_decide({0, 1}, voters) and not may_decide({2, 3}, voters) and not may_decide({2, 3}, voters, {0})
    assert may_decide({2, 3}, voters, {0, 1}) and may_decide({3}, voters, {0, 1, 2})
    assert not may_decide({3}, voters, {1, 2}), "node 0 may go on with those that have died since"
    assert not may_decide(set(), set(), {0}) and not may_decide({7}, set())
