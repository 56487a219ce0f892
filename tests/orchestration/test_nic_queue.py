"""One card's queue: urgency before turns, turns by planned shares, few busy peers at once, nothing lost or starved."""
from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from bpsfast.orchestration.priority.send_queue import CreditQueue, NicQueue

PART = 100


def card(shares: dict[int, int], credit_nbytes: int = 2 * PART) -> NicQueue[int]:
    made: NicQueue[int] = NicQueue(credit_nbytes)
    for place, peer in enumerate(shares):
        made.add(peer, place)
    made.plan(shares)
    return made


def put(queue: NicQueue[int], peer: int, n: int, unit: int = 0) -> None:
    for i in range(n):
        queue.put(peer, i, order=2 * unit, key=i, nbytes=PART)


def peers_of(queue: NicQueue[int], n: int) -> list[int]:
    """Return whom the next *n* writes go to, each delivered at once."""
    found = []
    for _ in range(n):
        peer, _ = queue.pop()
        queue.release(peer, PART)
        found.append(peer)
    return found


def test_turns_follow_the_planned_shares():
    queue = card({1: 3 * PART, 2: PART, 3: PART})
    for peer, n in ((1, 30), (2, 10), (3, 10)):
        put(queue, peer, n)
    sent = peers_of(queue, 50)
    for begin in range(0, 50, 5):
        assert Counter(sent[begin : begin + 5]) == {1: 3, 2: 1, 3: 1}


def test_what_is_more_urgent_goes_first_whosever_turn_it_is():
    queue = card({1: PART, 2: PART})
    put(queue, 1, 3, unit=1)
    put(queue, 2, 3, unit=1)
    assert peers_of(queue, 1) == [1]
    put(queue, 1, 2, unit=0)
    assert peers_of(queue, 5) == [1, 1, 2, 2, 2]


def test_only_so_many_are_busy_that_the_largest_share_gets_its_part():
    queue = card({1: 2 * PART, 2: PART, 3: PART})
    assert queue.breadth == 2  # of 4 partitions a step, 2 go to peer 1: half of the card
    for peer in (1, 2, 3):
        put(queue, peer, 4)
    assert [queue.pop()[0], queue.pop()[0]] == [1, 2]
    assert queue.pop() is None  # 3 has the turn: while two are busy it waits, and nobody overtakes it
    queue.release(2, PART)
    assert queue.pop()[0] == 3


def test_equal_shares_need_no_limit_and_begin_where_they_are_told():
    queue = NicQueue(PART)
    for peer, place in ((0, 2), (1, 0), (2, 1)):
        queue.add(peer, place)
    for peer in range(3):
        put(queue, peer, 2)
    assert [queue.pop()[0] for _ in range(3)] == [1, 2, 0]
    assert queue.pop() is None  # credit
    assert (queue.queued, queue.in_flight_nbytes, queue.peak_nbytes) == (3, 3 * PART, PART)


def test_who_was_idle_claims_one_step_of_the_past_at_most():
    queue = card({1: 10 * PART, 2: 10 * PART})
    put(queue, 1, 101)
    peers_of(queue, 100)
    put(queue, 1, 29)
    put(queue, 2, 30)
    assert peers_of(queue, 12)[:9] == [2] * 9
    assert Counter(peers_of(queue, 20)) == {1: 10, 2: 10}


def test_shares_of_another_plan_are_no_measure():
    """As of a small tensor that is declared first, and goes to one peer alone."""
    queue = card({1: 1})
    queue.add(2, 1)
    put(queue, 1, 3)
    assert peers_of(queue, 3) == [1, 1, 1]
    put(queue, 1, 1)
    queue.plan({1: 3 * PART, 2: 3 * PART})
    put(queue, 1, 5)
    put(queue, 2, 6)
    sent = peers_of(queue, 12)
    assert all(Counter(sent[begin : begin + 2]) == {1: 1, 2: 1} for begin in range(0, 12, 2))


def test_a_card_that_has_sent_everything_owes_nobody():
    queue = card({1: 4 * PART, 2: 4 * PART})
    put(queue, 1, 4)
    assert peers_of(queue, 4) == [1] * 4
    put(queue, 1, 4)
    put(queue, 2, 4)
    sent = peers_of(queue, 8)
    assert all(Counter(sent[begin : begin + 2]) == {1: 1, 2: 1} for begin in range(0, 8, 2))


def test_a_held_peer_gets_nothing_and_is_in_nobodys_way():
    queue = card({1: 4 * PART, 2: PART, 3: PART})
    assert queue.breadth == 2  # never less: with one at a time the card would idle whenever the turn changes
    for peer in (1, 2, 3):
        put(queue, peer, 3)
    assert [queue.pop()[0], queue.pop()[0]] == [1, 2]
    assert queue.pop() is None
    queue.hold(1)
    assert queue.is_held(1)
    queue.release(2, PART)
    assert peers_of(queue, 5) == [3, 2, 3, 2, 3]
    assert queue.pop() is None
    queue.resume(1)
    assert peers_of(queue, 2) == [1, 1]


@given(st.data())
def test_everything_put_is_sent_once_within_credit(data):
    n_peers = data.draw(st.integers(1, 5))
    shares = {peer: data.draw(st.integers(0, 10)) * PART for peer in range(n_peers)}
    queue = card(shares, credit_nbytes=data.draw(st.integers(1, 4)) * PART)
    under_way: list[tuple[int, int]] = []
    left = {(peer, i) for peer in range(n_peers) for i in range(data.draw(st.integers(0, 8)))}
    waiting = data.draw(st.permutations(sorted(left)))
    while left:
        action = data.draw(st.sampled_from(["put", "pop", "release"]))
        if action == "put" and waiting:
            peer, i = waiting.pop()
            queue.put(peer, i, order=data.draw(st.integers(0, 6)), key=i, nbytes=PART)
        elif action == "release" and under_way:
            peer, i = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            queue.release(peer, PART)
        else:
            found = queue.pop()
            # With nothing under way something is always sent.
            assert found is not None or under_way or not queue.queued
            if found is not None:
                left.remove(found)
                under_way.append(found)
                n_busy = len({peer for peer, _ in under_way})
                assert n_busy <= queue.breadth
            elif not under_way and waiting:
                peer, i = waiting.pop()
                queue.put(peer, i, order=0, key=i, nbytes=PART)
    assert queue.pop() is None and not queue.queued


def test_credit_may_change_with_bytes_under_way():
    queue = card({1: PART, 2: PART}, credit_nbytes=2 * PART)
    put(queue, 1, 6)
    assert [queue.pop() is not None for _ in range(3)] == [True, True, False]
    queue.set_credit(4 * PART)
    assert [queue.pop() is not None for _ in range(3)] == [True, True, False]
    queue.set_credit(PART)
    for _ in range(3):
        queue.release(1, PART)
        assert queue.pop() is None, "what is under way already counts"
    queue.release(1, PART)
    assert queue.pop() is not None


def test_who_is_removed_takes_its_turns_and_what_waits_for_it_along():
    queue = card({1: 2 * PART, 2: PART, 3: PART})
    for peer in (1, 2, 3):
        put(queue, peer, 3)
    assert [queue.pop()[0], queue.pop()[0]] == [1, 2] and queue.breadth == 2
    queue.hold(1)
    queue.remove(1)
    assert queue.queued == 5 and queue.in_flight_nbytes == PART
    assert queue.pop()[0] == 3, "it was busy, and nobody waits for that any more"
    queue.release(2, PART)
    queue.release(3, PART)
    assert Counter(peers_of(queue, 4)) == {2: 2, 3: 2} and queue.pop() is None


def test_all_may_be_removed():
    queue = card({1: PART})
    put(queue, 1, 1)
    queue.remove(1)
    queue.remove(1)
    assert queue.pop() is None and queue.queued == 0 and queue.first_order is None


@pytest.mark.parametrize("count", ["queued", "in_flight_nbytes", "peak_nbytes"])
def test_counts_are_read_while_another_thread_removes_a_peer(count, monkeypatch):
    queue = card(dict.fromkeys(range(3), PART))
    put(queue, 1, 2)
    read = vars(CreditQueue).get(count)

    def read_and_remove(self):
        queue.remove(0)
        return read.fget(self) if read is not None else vars(self)[count]

    monkeypatch.setattr(CreditQueue, count, property(read_and_remove), raising=False)
    assert getattr(queue, count) == (2 if count == "queued" else 0)
