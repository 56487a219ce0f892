"""The order of writes: by urgency within a pass, and what comes again goes behind what waits."""
from __future__ import annotations

import heapq

from hypothesis import given, strategies as st

from bpsfast.orchestration.priority.send_queue import ArrivalOrder, WriteOrder, urgency


class Queue:
    """Everything that waits, in its order."""

    def __init__(self, order: WriteOrder | ArrivalOrder | None = None) -> None:
        self.order = order or WriteOrder()
        self.heap: list[tuple[int, int, int]] = []

    def put(self, part: int, rank: int, is_result: bool = False) -> int:
        place = self.order.enter(part, rank, is_result, self.heap[0][0] if self.heap else None)
        heapq.heappush(self.heap, (*place, part))
        return place.order

    def pop(self) -> int:
        return heapq.heappop(self.heap)[-1]

    def drained(self) -> list[int]:
        return [self.pop() for _ in range(len(self.heap))]


def test_units_by_urgency_and_within_one_partials_before_results():
    queue = Queue()
    orders = [queue.put(part, rank, is_result) for part, (rank, is_result) in enumerate(
        [(1, True), (0, True), (1, False), (0, False)])]
    assert queue.drained() == [3, 1, 2, 0]
    assert urgency(orders[3]) == urgency(orders[1]) < urgency(orders[2])


def test_the_next_step_leaves_after_what_waits_of_this_one():
    queue = Queue()
    for part in range(4):
        queue.put(part, part)
    assert [queue.pop(), queue.pop()] == [0, 1]
    for part in range(4):
        queue.put(part, part)
    assert queue.drained() == [2, 3, 0, 1, 2, 3]


def test_a_tensor_that_is_pushed_often_only_puts_itself_back():
    queue = Queue()
    queue.put(9, 5)  # a gradient
    for _ in range(3):
        queue.put(0, 0)  # a flag, more urgent than all
    queue.put(8, 4)
    queue.put(7, 3)
    assert queue.drained() == [0, 7, 8, 9, 0, 0]


def test_a_tensor_that_is_pushed_now_and_then_joins_what_waits():
    queue = Queue()
    for _ in range(10):
        queue.put(1, 4)
        queue.drained()
    queue.put(1, 4)
    queue.put(5, 3)
    queue.put(1, 4)
    assert queue.drained() == [5, 1, 1]


def test_without_urgency_what_is_there_first_leaves_first():
    queue = Queue(ArrivalOrder())
    orders = [queue.put(part, rank, is_result) for part, rank, is_result in
              [(3, 3, False), (0, 0, False), (3, 3, False), (1, 1, True)]]
    assert queue.drained() == [3, 0, 3, 1]
    assert len(set(map(urgency, orders))) == 1, "so that a card's peers take turns"


@given(st.lists(st.one_of(st.tuples(st.integers(0, 5), st.integers(0, 3)), st.none()), max_size=60))
def test_a_partition_never_overtakes_itself_and_nothing_waits_for_ever(events):
    queue, put, popped = Queue(), 0, []
    serial: dict[int, list[int]] = {}
    ranks: dict[int, int] = {}
    for event in events:
        if event is None:
            if queue.heap:
                popped.append(queue.pop())
            continue
        part, rank = event[0], ranks.setdefault(*event)
        serial.setdefault(part, []).append(queue.put(part, rank))
        put += 1
    popped += queue.drained()
    assert len(popped) == put
    assert all(orders == sorted(set(orders)) for orders in serial.values())


def test_what_is_forgotten_begins_anew():
    fresh, used = WriteOrder(), WriteOrder()
    for _ in range(3):
        used.enter(7, 0, False, None)
    used.forget(7)
    used.forget(8)
    assert used.enter(7, 0, False, fresh.enter(7, 0, False, None).order).order == fresh.enter(9, 0, False, None).order
