"""One order on all ranks: whatever the order in which each is given things, and however little credit there is."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.errors import BusyError, MismatchError
from bpsfast.orchestration.priority.turns import Entry, Follower, Leader


def entry(name, nbytes=10, kind="float32 sum", part=0):
    return Entry(name=name, part=part, nbytes=nbytes, kind=kind)


def test_the_most_urgent_first_and_no_more_than_credit():
    leader = Leader(20)
    for name, priority in [("late", 0), ("urgent", 5), ("middle", 1), ("last", 0)]:
        leader.give(entry(name), priority)
    assert [each.name for each in leader.turns()] == ["urgent", "middle"]
    assert leader.turns() == []
    leader.done(entry("middle"))
    assert [each.name for each in leader.turns()] == ["late"]


def test_a_follower_begins_in_the_leaders_order_when_it_has_been_given_the_same():
    follower = Follower()
    follower.give(entry("b"))
    follower.tell([entry("a"), entry("b")])
    assert follower.turns() == [] and follower.awaited == entry("a") and follower.untold == []
    follower.give(entry("c"))
    follower.give(entry("a"))
    assert follower.turns() == [entry("a"), entry("b")]
    assert follower.awaited is None and follower.untold == [entry("c")]


@pytest.mark.parametrize("other", [entry("a", nbytes=11), entry("a", kind="float16 sum")])
def test_what_differs_is_named_with_both_values(other):
    follower = Follower()
    follower.give(other)
    follower.tell([entry("a")])
    words = f"10 bytes, float32 sum on rank 0, {other.nbytes} bytes, {other.kind} here"
    with pytest.raises(MismatchError, match=words):
        follower.turns()


def test_twice_is_an_error_until_it_is_done():
    leader, follower = Leader(100), Follower()
    leader.give(entry("a"), 0)
    follower.give(entry("a"))
    with pytest.raises(BusyError, match="'a' part 0"):
        leader.give(entry("a"), 0)
    with pytest.raises(BusyError, match="'a' part 0"):
        follower.give(entry("a"))
    follower.tell(leader.turns())
    assert follower.turns() == [entry("a")]
    with pytest.raises(BusyError):
        follower.give(entry("a"))
    leader.done(entry("a"))
    follower.done(entry("a"))
    leader.give(entry("a"), 0)
    follower.give(entry("a"))


@settings(deadline=None)
@given(data=st.data())
def test_all_ranks_begin_everything_in_one_order_whatever_order_they_are_given_it_in(data):
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=12))
    entries = [entry(f"t{i}", nbytes) for i, nbytes in enumerate(sizes)]
    priorities = {each.name: data.draw(st.integers(-3, 3)) for each in entries}
    n_followers = data.draw(st.integers(1, 3))
    leader = Leader(data.draw(st.integers(1, 120)))
    followers = [Follower() for _ in range(n_followers)]
    left = [data.draw(st.permutations(entries)) for _ in range(n_followers + 1)]
    begun = [[] for _ in range(n_followers + 1)]
    complete = 0
    while complete < len(entries):
        who = data.draw(st.integers(0, n_followers))
        if left[who]:
            given = left[who].pop()
            leader.give(given, priorities[given.name]) if who == 0 else followers[who - 1].give(given)
        else:  # who has nothing to give may not be what the others wait for
            who = next((rank for rank in range(n_followers + 1) if left[rank]), None)
            if who is not None:
                given = left[who].pop()
                leader.give(given, priorities[given.name]) if who == 0 else followers[who - 1].give(given)
        turns = leader.turns()
        begun[0] += turns
        for rank, follower in enumerate(followers, 1):
            follower.tell(turns)
            begun[rank] += follower.turns()
        while complete < min(map(len, begun)):  # an all-reduce ends where all have begun it
            assert len({order[complete] for order in begun}) == 1
            leader.done(begun[0][complete])
            for follower in followers:
                follower.done(begun[0][complete])
            complete += 1
    assert all(order == begun[0] for order in begun)
    assert {each.name for each in begun[0]} == set(priorities) and len(begun[0]) == len(entries)


def test_with_others_nothing_begins_before_all_have_been_given_it():
    leader = Leader(100, others=[1, 2])
    leader.given_to(1, [entry("b").key])
    leader.give(entry("a"), 9)
    leader.give(entry("b"), 0)
    assert leader.turns() == [] and leader.waits_for([1]) == entry("a") and leader.waits_for([0]) is None
    leader.given_to(2, [entry("b").key])
    assert leader.turns() == [entry("b")], "which is less urgent, but all have it"
    leader.given_to(1, [entry("a").key])
    assert leader.waits_for([1]) is None and leader.waits_for([1, 2]) == entry("a")
    leader.given_to(2, [entry("a").key])
    assert leader.turns() == [entry("a")] and leader.waits_for([1, 2]) is None
    leader.done(entry("a"))
    leader.give(entry("a"), 0)
    assert leader.turns() == [], "others must be given it again"


@given(st.permutations([(rank, name) for rank in range(3) for name in "abcd"]))
def test_with_others_all_begin_everything_in_whatever_order_it_is_given(events):
    leader = Leader(1000, others=[1, 2])
    given, begun = {}, []
    for rank, name in events:
        given.setdefault(name, set()).add(rank)
        if rank == 0:
            leader.give(entry(name), 0)
        else:
            leader.given_to(rank, [entry(name).key])
        for turn in leader.turns():
            assert given[turn.name] == {0, 1, 2}
            begun.append(turn.name)
    assert sorted(begun) == list("abcd")
