"""Decides which partition a node sends next, and to which peer: most urgent first, with a limit of bytes in flight.

`WriteOrder` gives each write its place, `CreditQueue` holds the writes to one peer, `NicQueue` those to all peers. The
simulator decides by these; nodes decide natively (`pyx/send_queue.h`), and tests show that they decide the same.

The optimum (OSDI'20 section 3.1) needs every NIC busy in both directions to the very end of a step. A NIC that serves
all peers alike misses it wherever shares differ: bytes for a helper leave as slowly as those for one of the fewer
workers, so the helper's NIC is idle at first and late at the end, by up to a quarter of the step for 0 < k < n helpers.
So peers take turns by how much of their planned share they still have to get (start-time fair queueing, Goyal et al.,
SIGCOMM'96, with the planned bytes of a step as weights). Because the network below shares a NIC evenly among all
connections that have something to send, only as many have something at a time as leave the largest share its part.
"""
from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from ..messages import UnitPlan

Item = TypeVar("Item")

#: Bits of a write's order below the pass: any partition number, and one bit for results.
_RANK_BITS = 32
#: With one busy peer at a time the NIC would be idle at each change, and one peer that takes nothing would stop all.
_MIN_BREADTH = 2


class SendKey(NamedTuple):
    """Where a write stands among those of one node: the lowest `order` is sent first, ties go by the lowest `key`."""

    order: int
    key: int


class WriteOrder:
    """Orders the writes of one node: by pass, then by urgency of the unit. Owner thread only.

    A fast node is in its next step while the last sums of the step before still wait for a slower node's link. By
    urgency alone the next step, which begins with something urgent, would overtake them all; but it cannot complete a
    sum before the slower node has joined in, and that node waits for what was overtaken. On full links this doubled the
    time of a step. The engine sums in the same order (``pyx/part.h``), for the same reason.

    Steps are told apart by passes, not by rounds, which each tensor counts for itself: a partition joins the oldest
    pass that waits, or the pass after the last one that it was in. So a tensor that is pushed often yields to the
    others, and one that is pushed seldom may overtake.
    """

    def __init__(self) -> None:
        self._newest = 0
        self._last: dict[int, int] = {}

    def enter(self, part: int, rank: int, is_result: bool, first_waiting: int | None) -> SendKey:
        """Return the key of *part*, whose partial or result is ready: one key for all peers that it is sent to.

        *rank* is that of its unit's first partition (`rank_parts`): units are sent by urgency. Within a unit partials
        come before results: no unit is complete before its last result has arrived, and a partial behind results keeps
        another node's link idle at the end. *first_waiting*: the lowest order that waits, None if none does.
        """
        oldest = self._newest if first_waiting is None else first_waiting >> _RANK_BITS
        joined = max(oldest, self._last.get(part, 0) + 1)
        self._last[part] = joined
        self._newest = max(self._newest, joined)
        return SendKey(order_of(joined, rank, is_result), part)

    def forget(self, part: int) -> None:
        """Drop what is known of *part*, whose number will be used again."""
        self._last.pop(part, None)


class ArrivalOrder:
    """First in, first out, for comparison with `WriteOrder`. Owner thread only."""

    def __init__(self) -> None:
        self._n_entered = 0

    def enter(self, part: int, rank: int, is_result: bool, first_waiting: int | None) -> SendKey:
        """Return a key behind all keys so far."""
        self._n_entered += 1
        return SendKey(0, self._n_entered)

    def forget(self, part: int) -> None:
        """Do nothing."""


def order_of(pass_: int, rank: int, is_result: bool) -> int:
    """Return the order of a write in the pass *pass_* whose unit has *rank*."""
    return pass_ << _RANK_BITS | rank << 1 | is_result


def urgency(order: int) -> int:
    """Return what writes of the same pass and unit have in common; lower is more urgent."""
    return order >> 1


class CreditQueue(Generic[Item]):
    """A priority queue to one peer with a limit of bytes in flight. Never blocks; owner thread only.

    Credit trades latency for throughput: bytes that the network already has delay an urgent tensor that comes later,
    too few of them leave the link idle. Source: ByteScheduler (SOSP'19) section 4; BytePS ``scheduled_queue.cc``.
    Unlike there, an item that happens to fit never overtakes the head, so a large urgent partition is not starved.

    An item's order is fixed when it is put. Ties go by key, then by arrival. One item is always admitted when nothing
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
        """The number of items that wait."""
        return len(self._heap)

    def put(self, item: Item, *, order: int, key: int, nbytes: int) -> None:
        """Queue *item* of *nbytes*; the lowest *order* (`WriteOrder`) is sent first."""
        heapq.heappush(self._heap, (order, key, self._arrivals, nbytes, item))
        self._arrivals += 1
        self.queued_nbytes += nbytes

    @property
    def head(self) -> tuple[int, int]:
        """Order and bytes of the next item. IndexError if nothing waits."""
        order, _, _, nbytes, _ = self._heap[0]
        return order, nbytes

    @property
    def admits(self) -> bool:
        """Whether an item waits and there is credit for it."""
        if not self._heap:
            return False
        return not self.in_flight or self.in_flight_nbytes + self._heap[0][3] <= self.credit_nbytes

    def pop(self) -> Item | None:
        """Take the head and its credit; None if nothing waits or the credit is used up."""
        if not self.admits:
            return None
        *_, nbytes, item = heapq.heappop(self._heap)
        self.queued_nbytes -= nbytes
        self.in_flight += 1
        self.in_flight_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.in_flight_nbytes)
        return item

    def release(self, nbytes: int) -> None:
        """Give back the credit of one item of *nbytes*, which has reached the peer."""
        if not self.in_flight or nbytes > self.in_flight_nbytes:
            raise ValueError(f"release of {nbytes} bytes, but {self.in_flight} items of {self.in_flight_nbytes} bytes "
                             "are in flight")
        self.in_flight -= 1
        self.in_flight_nbytes -= nbytes

    def forget_in_flight(self) -> None:
        """Take back all credit: nothing in flight will be acknowledged any more."""
        self.in_flight = self.in_flight_nbytes = 0


def rank_parts(units: Iterable[UnitPlan]) -> list[int]:
    """Return order[part] for all partitions of *units*: a permutation, 0 is most urgent.

    By priority (higher first), then unit, then partition. Numbers that no unit has (a generation failed) come last.
    """
    by_urgency = sorted((-unit.priority, unit.unit, part.part) for unit in units for part in unit.parts)
    parts = [part for _, _, part in by_urgency]
    parts += sorted(set(range(max(parts, default=-1) + 1)).difference(parts))
    order = [0] * len(parts)
    for rank, part in enumerate(parts):
        order[part] = rank
    return order


class _Peer(Generic[Item]):
    """One destination. `turn`: what it was sent so far, in shares of a step; `tie_breaker`: see `NicQueue.add`."""

    def __init__(self, index: int, tie_breaker: int, credit_nbytes: int) -> None:
        self.index = index
        self.tie_breaker = tie_breaker
        self.queue: CreditQueue[Item] = CreditQueue(credit_nbytes)
        self.share_nbytes = 0
        self.turn = 0.0
        self.held = False


class NicQueue(Generic[Item]):
    """One `CreditQueue` for each peer of a NIC, and whose turn it is. Never blocks.

    Owner thread only, except for `hold` and the counters. *credit_nbytes*: bytes that may be in flight to one peer.
    """

    def __init__(self, credit_nbytes: int) -> None:
        self._credit_nbytes = credit_nbytes
        self._peers: dict[int, _Peer[Item]] = {}
        self._waiting: dict[int, _Peer[Item]] = {}
        self._busy: dict[int, _Peer[Item]] = {}
        self._front = 0.0
        #: How many peers may have bytes in flight at a time.
        self.breadth = _MIN_BREADTH

    def add(self, peer: int, place: int) -> None:
        """Add a destination. *place* breaks ties between peers; use different values on different nodes."""
        self._peers[peer] = _Peer(peer, place, self._credit_nbytes)
        self._weigh({})

    def plan(self, shares: Mapping[int, int]) -> None:
        """Set how many bytes each peer is sent in a step; empty: all peers share alike.

        What was sent so far is forgotten, because it was sent by another plan's shares.
        """
        self._forget_turns()
        self._weigh(shares)

    def _weigh(self, shares: Mapping[int, int]) -> None:
        for index, peer in self._peers.items():
            peer.share_nbytes = shares.get(index, 0)
        planned = [peer.share_nbytes for peer in self._peers.values() if peer.share_nbytes]
        self.breadth = max(_MIN_BREADTH, round(sum(planned) / max(planned))) if planned else len(self._peers)

    def set_credit(self, nbytes: int) -> None:
        """Allow *nbytes* in flight to one peer from now on, those already in flight included."""
        self._credit_nbytes = nbytes
        for peer in self._peers.values():
            peer.queue.credit_nbytes = nbytes

    @property
    def queued(self) -> int:
        """The number of items that wait. Any thread: peers may be removed meanwhile."""
        return sum(peer.queue.queued for peer in tuple(self._peers.values()))

    @property
    def first_order(self) -> int | None:
        """The lowest order that waits, over all peers."""
        return min((peer.queue.head[0] for peer in self._waiting.values()), default=None)

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes in flight to all peers. Any thread."""
        return sum(peer.queue.in_flight_nbytes for peer in tuple(self._peers.values()))

    @property
    def peak_nbytes(self) -> int:
        """The most bytes that were in flight to one peer. Any thread."""
        return max((peer.queue.peak_nbytes for peer in tuple(self._peers.values())), default=0)

    def put(self, peer: int, item: Item, *, order: int, key: int, nbytes: int) -> None:
        """Queue *item* for *peer*; *order* and *key* are those of `WriteOrder`."""
        found = self._peers[peer]
        if not self._waiting and not self._busy:
            self._forget_turns()  # the NIC has sent everything: no peer has a claim
        if not found.queue.queued and not found.queue.in_flight:
            found.turn = max(found.turn, self._front - 1.0)  # a peer that was idle for a step has no claim on the past
        found.queue.put(item, order=order, key=key, nbytes=nbytes)
        self._waiting[peer] = found

    def pop(self) -> tuple[int, Item] | None:
        """Take the next (peer, item); None if nothing waits, or credit or another peer's turn is awaited."""
        ready = [peer for peer in self._waiting.values() if not peer.held and peer.queue.admits]
        if not ready:
            return None
        chosen = min(ready, key=lambda peer: (urgency(peer.queue.head[0]), peer.turn, peer.tie_breaker))
        queue = chosen.queue
        if not queue.in_flight:
            if sum(not peer.held for peer in self._busy.values()) >= self.breadth:
                return None  # wait until a busy peer is done; more bytes for the busy ones would only take longer
            self._busy[chosen.index] = chosen
        _, nbytes = queue.head
        item = queue.pop()
        assert item is not None
        self._front = max(self._front, chosen.turn)
        chosen.turn += nbytes / max(1, chosen.share_nbytes or nbytes)
        if not queue.queued:
            del self._waiting[chosen.index]
        return chosen.index, item

    def _forget_turns(self) -> None:
        self._front = 0.0
        for peer in self._peers.values():
            peer.turn = 0.0

    def release(self, peer: int, nbytes: int) -> None:
        """Give back the credit of one item of *nbytes*, which has reached *peer*."""
        queue = self._peers[peer].queue
        queue.release(nbytes)
        if not queue.in_flight:
            del self._busy[peer]

    def hold(self, peer: int) -> None:
        """Send nothing more to *peer* until `resume`. Any thread."""
        self._peers[peer].held = True

    def remove(self, peer: int) -> None:
        """Forget *peer*, with all that waits for it or is in flight to it."""
        for found in (self._peers, self._waiting, self._busy):
            found.pop(peer, None)
        self._weigh({index: each.share_nbytes for index, each in self._peers.items()})

    def is_held(self, peer: int) -> bool:
        """Whether nothing is sent to *peer*."""
        return self._peers[peer].held

    def resume(self, peer: int) -> None:
        """Send to *peer* again; what was in flight is forgotten, because it will not be acknowledged any more."""
        found = self._peers[peer]
        self._busy.pop(peer, None)
        found.queue.forget_in_flight()
        found.held = False
