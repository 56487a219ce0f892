"""Per-destination queues: order, credit, and the integer ranks that the engine compares."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bpsfast.orchestration.messages import PartPlan, UnitPlan
from bpsfast.orchestration.priority.send_queue import CreditQueue, rank_parts


def drain(queue):
    """Everything that can be popped now."""
    items = []
    while (item := queue.pop()) is not None:
        items.append(item)
    return items


def unit(number, priority, parts):
    return UnitPlan(unit=number, name=f"u{number}", dtype="uint8", average=False, priority=priority, nbytes=len(parts),
                    stride=4096, members=(),
                    parts=tuple(PartPlan(part=part, offset=0, nbytes=1, owner=0) for part in parts))


def test_lowest_order_first_ties_by_key_then_arrival():
    queue = CreditQueue(1000)
    for item, order, key in [("late", 5, 0), ("b", 1, 2), ("a1", 1, 1), ("a2", 1, 1)]:
        queue.put(item, order=order, key=key, nbytes=10)
    assert (queue.queued, queue.queued_nbytes) == (4, 40)
    assert drain(queue) == ["a1", "a2", "b", "late"]
    assert (queue.in_flight, queue.in_flight_nbytes, queue.queued_nbytes, queue.peak_nbytes) == (4, 40, 0, 40)


def test_items_are_never_compared():
    queue = CreditQueue(1000)
    queue.put({}, order=0, key=0, nbytes=1)
    queue.put({}, order=0, key=0, nbytes=1)
    assert drain(queue) == [{}, {}]


def test_the_head_is_not_overtaken_by_what_would_fit():
    queue = CreditQueue(100)
    queue.put("first", order=0, key=0, nbytes=60)
    queue.put("big", order=1, key=1, nbytes=60)
    queue.put("small", order=2, key=2, nbytes=10)
    assert drain(queue) == ["first"]
    queue.release(60)
    assert drain(queue) == ["big", "small"]


def test_one_is_admitted_when_nothing_is_in_flight():
    queue = CreditQueue(0)
    queue.put("a", order=0, key=0, nbytes=5000)
    queue.put("b", order=1, key=0, nbytes=1)
    assert drain(queue) == ["a"]
    queue.release(5000)
    assert drain(queue) == ["b"]


def test_an_urgent_latecomer_goes_first():
    queue = CreditQueue(1)
    queue.put("bulk 1", order=8, key=8, nbytes=1)
    queue.put("bulk 2", order=9, key=9, nbytes=1)
    assert queue.pop() == "bulk 1"
    queue.put("urgent", order=0, key=0, nbytes=1)
    queue.release(1)
    assert queue.pop() == "urgent"


def test_credit_that_was_not_taken_cannot_be_released():
    queue = CreditQueue(10)
    with pytest.raises(ValueError, match="release of 1 bytes, but 0 items"):
        queue.release(1)
    queue.put("a", order=0, key=0, nbytes=4)
    assert queue.pop() == "a"
    with pytest.raises(ValueError, match="release of 5 bytes, but 1 items of 4 bytes"):
        queue.release(5)


def test_forgotten_credit_is_there_again():
    queue: CreditQueue[str] = CreditQueue(10)
    for name in "abc":
        queue.put(name, order=0, key=0, nbytes=10)
    assert (queue.pop(), queue.pop()) == ("a", None)
    queue.forget_in_flight()
    assert (queue.pop(), queue.in_flight_nbytes, queue.queued) == ("b", 10, 1)


def test_negative_credit_is_refused():
    with pytest.raises(ValueError, match="-1"):
        CreditQueue(-1)


class Dispatch(RuleBasedStateMachine):
    """A queue against a list that is searched for its minimum."""

    def __init__(self):
        super().__init__()
        self.queue = CreditQueue(50)
        self.waiting = []
        self.flying = []
        self.n = 0

    @rule(order=st.integers(0, 3), key=st.integers(0, 3), nbytes=st.integers(0, 80))
    def put(self, order, key, nbytes):
        self.queue.put(self.n, order=order, key=key, nbytes=nbytes)
        self.waiting.append((order, key, self.n, nbytes))
        self.n += 1

    @rule()
    def pop(self):
        item = self.queue.pop()
        head = min(self.waiting, default=None)
        admitted = head is not None and (not self.flying or sum(self.flying) + head[3] <= 50)
        assert item == (head[2] if admitted else None)
        if admitted:
            self.waiting.remove(head)
            self.flying.append(head[3])

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def release(self, data):
        self.queue.release(self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1))))

    @invariant()
    def counts(self):
        assert (self.queue.in_flight, self.queue.in_flight_nbytes) == (len(self.flying), sum(self.flying))
        assert (self.queue.queued, self.queue.queued_nbytes) == (len(self.waiting), sum(w[3] for w in self.waiting))
        assert self.queue.in_flight_nbytes <= 50 or self.queue.in_flight == 1 or max(self.flying) > 50


Dispatch.TestCase.settings = settings(deadline=None)
TestDispatch = Dispatch.TestCase


def test_rank_parts_by_priority_then_unit_then_part():
    units = [unit(0, -2, [0, 1]), unit(1, 0, [2]), unit(2, -2, [3])]
    assert rank_parts(units) == [1, 2, 0, 3]
    assert rank_parts([]) == []


def test_numbers_of_a_failed_generation_rank_last():
    assert rank_parts([unit(0, -1, [1]), unit(3, 5, [4])]) == [2, 1, 3, 4, 0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 4)), max_size=20), st.randoms(use_true_random=False))
def test_queue_order_is_rank_parts_order(drawn, random):
    units, next_part = [], 0
    for number, (priority, n_parts) in enumerate(drawn):
        units.append(unit(number, priority, range(next_part, next_part + n_parts)))
        next_part += n_parts
    order = rank_parts(units)
    assert sorted(order) == list(range(next_part))
    queue = CreditQueue(1 << 40)
    parts = list(range(next_part))
    random.shuffle(parts)
    for part in parts:
        queue.put(part, order=order[part], key=part, nbytes=1)
    by_policy = [part.part for u in sorted(units, key=lambda u: (-u.priority, u.unit)) for part in u.parts]
    assert drain(queue) == sorted(range(next_part), key=order.__getitem__) == by_policy
