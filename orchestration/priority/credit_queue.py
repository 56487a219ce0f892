"""What is sent next to one destination: most urgent first, and never more bytes under way than its credit.

Credit trades latency for throughput: all the bytes already handed to the network delay an urgent tensor that comes
late, too few of them leave the link idle. Source: ByteScheduler (SOSP'19) section 4; BytePS ``scheduled_queue.cc``.
Unlike there, the head is never overtaken by something that happens to fit: an urgent big partition is not starved.
"""
from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Generic, TypeVar

from ..messages import UnitPlan

Item = TypeVar("Item")


class CreditQueue(Generic[Item]):
    """A priority queue with a budget of bytes in flight. Never blocks; owner thread only.

    An item's order is frozen when it is put. Ties go by key, then by arrival. Something is always admitted when nothing
    is in flight, so a credit below one partition is slow and not a deadlock.
    """

    def __init__(self, credit_nbytes: int) -> None:
        if credit_nbytes < 0:
            raise ValueError(f"credit_nbytes must not be negative, got {credit_nbytes}")
        self.credit_nbytes = credit_nbytes
        self.in_flight = 0
        self.in_flight_nbytes = 0
        self.queued_nbytes = 0
        self.peak_nbytes = 0
        self._heap: list[tuple[int, int, int, int, Item]] = []
        self._arrivals = 0

    @property
    def queued(self) -> int:
        """Count the items that wait."""
        return len(self._heap)

    def put(self, item: Item, *, order: int, key: int, nbytes: int) -> None:
        """Queue *item* of *nbytes*; the lowest *order* (`write_order`) is sent first."""
        heapq.heappush(self._heap, (order, key, self._arrivals, nbytes, item))
        self._arrivals += 1
        self.queued_nbytes += nbytes

    @property
    def head(self) -> tuple[int, int]:
        """Order and bytes of what is sent next. IndexError if nothing waits."""
        order, _, _, nbytes, _ = self._heap[0]
        return order, nbytes

    @property
    def admits(self) -> bool:
        """Whether something waits and there is credit for it."""
        if not self._heap:
            return False
        return not self.in_flight or self.in_flight_nbytes + self._heap[0][3] <= self.credit_nbytes

    def pop(self) -> Item | None:
        """Take the head and its credit; None if nothing waits or the head's credit is not there yet."""
        if not self.admits:
            return None
        *_, nbytes, item = heapq.heappop(self._heap)
        self.queued_nbytes -= nbytes
        self.in_flight += 1
        self.in_flight_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.in_flight_nbytes)
        return item

    def release(self, nbytes: int) -> None:
        """Give back the credit of one item of *nbytes*: its bytes have reached the destination."""
        if not self.in_flight or nbytes > self.in_flight_nbytes:
            raise ValueError(f"release of {nbytes} bytes, but {self.in_flight} items of {self.in_flight_nbytes} bytes "
                             "are in flight")
        self.in_flight -= 1
        self.in_flight_nbytes -= nbytes

    def forget_in_flight(self) -> None:
        """Take all credit back: nobody will say any more that what is under way has reached the destination."""
        self.in_flight = self.in_flight_nbytes = 0


def rank_parts(units: Iterable[UnitPlan]) -> list[int]:
    """Return order[part] for all partitions of *units*: a permutation, 0 is most urgent.

    By priority (higher first), then unit, then partition. Numbers that no unit has (a generation failed) come last.
    """
    by_urgency = sorted((-unit.priority, unit.unit, part.part) for unit in units for part in unit.parts)
    n_parts = max((part for _, _, part in by_urgency), default=-1) + 1
    order = [-1] * n_parts
    for rank, (_, _, part) in enumerate(by_urgency):
        order[part] = rank
    rank = len(by_urgency)
    for part in range(n_parts):
        if order[part] < 0:
            order[part] = rank
            rank += 1
    return order
