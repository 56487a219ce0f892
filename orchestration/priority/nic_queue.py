"""What one machine's card sends next, and to whom: the most urgent first; what is equally urgent, by the plan's shares.

The optimum (OSDI'20 section 3.1) needs every card busy both ways to the very end. A card that serves all peers alike
breaks that wherever shares differ: bytes for a helper leave as slowly as those for another worker, of which there are
fewer, so the helper's card idles at first and is late at the end: up to a quarter of the step for 0 < k < n helpers.
So peers take turns by what they still have to get of their share (start-time fair queueing, Goyal et al., SIGCOMM'96,
with the planned bytes of a step as weights). And since the network below shares out a card evenly among all
connections that have something to send, only so many have something at a time that the largest share gets its part.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from .credit_queue import CreditQueue
from .write_order import urgency

Item = TypeVar("Item")

#: With one at a time the card would idle whenever the turn changes, and one peer that takes nothing would stop all.
_LEAST_BREADTH = 2


class _Peer(Generic[Item]):
    """One destination. `turn`: how much it was sent, in shares of a step."""

    def __init__(self, index: int, place: int, credit_nbytes: int) -> None:
        self.index = index
        self.place = place
        self.queue: CreditQueue[Item] = CreditQueue(credit_nbytes)
        self.share_nbytes = 0
        self.turn = 0.0
        self.held = False


class NicQueue(Generic[Item]):
    """One `CreditQueue` for each peer, and whose turn it is. Never blocks; owner thread only, but for `hold`, counts.

    Parameters
    ----------
    credit_nbytes
        Bytes that may be under way to one peer.
    """

    def __init__(self, credit_nbytes: int) -> None:
        self._credit_nbytes = credit_nbytes
        self._peers: dict[int, _Peer[Item]] = {}
        self._waiting: dict[int, _Peer[Item]] = {}
        self._busy: dict[int, _Peer[Item]] = {}
        self._front = 0.0
        #: How many peers may have something under way at a time.
        self.breadth = _LEAST_BREADTH

    def add(self, peer: int, place: int) -> None:
        """Add a destination; *place*: whose turn it is when all have got the same, best not one for all cards."""
        self._peers[peer] = _Peer(peer, place, self._credit_nbytes)
        self._weigh({})

    def plan(self, shares: Mapping[int, int]) -> None:
        """Say how many bytes each peer is sent in a step. None at all: they share alike.

        What was sent before is forgotten: shares of another plan are no measure of it.
        """
        self._forget_turns()
        self._weigh(shares)

    def _weigh(self, shares: Mapping[int, int]) -> None:
        for index, peer in self._peers.items():
            peer.share_nbytes = shares.get(index, 0)
        planned = [peer.share_nbytes for peer in self._peers.values() if peer.share_nbytes]
        self.breadth = max(_LEAST_BREADTH, round(sum(planned) / max(planned))) if planned else len(self._peers)

    def set_credit(self, nbytes: int) -> None:
        """Let *nbytes* be under way to one peer from now on; what is under way already counts."""
        self._credit_nbytes = nbytes
        for peer in self._peers.values():
            peer.queue.credit_nbytes = nbytes

    @property
    def queued(self) -> int:
        """Count the items that wait. Any thread: peers may be removed meanwhile."""
        return sum(peer.queue.queued for peer in tuple(self._peers.values()))

    @property
    def first_order(self) -> int | None:
        """The lowest order that waits, for whomever."""
        return min((peer.queue.head[0] for peer in self._waiting.values()), default=None)

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes under way to all peers. Any thread."""
        return sum(peer.queue.in_flight_nbytes for peer in tuple(self._peers.values()))

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that were under way to one peer. Any thread."""
        return max((peer.queue.peak_nbytes for peer in tuple(self._peers.values())), default=0)

    def put(self, peer: int, item: Item, *, order: int, key: int, nbytes: int) -> None:
        """Queue *item* for *peer*; `WriteOrder` gives the *order*, ties go by *key*."""
        found = self._peers[peer]
        if not self._waiting and not self._busy:
            self._forget_turns()  # a card that has sent everything owes nobody
        if not found.queue.queued and not found.queue.in_flight:
            found.turn = max(found.turn, self._front - 1.0)  # who was idle for a step has no claim on the past
        found.queue.put(item, order=order, key=key, nbytes=nbytes)
        self._waiting[peer] = found

    def pop(self) -> tuple[int, Item] | None:
        """Take what is sent next: (peer, item). None if nothing waits, or credit or a peer's turn has to come first."""
        chosen: _Peer[Item] | None = None
        least: tuple[int, float, int] | None = None
        for peer in self._waiting.values():
            if peer.held or not peer.queue.admits:
                continue
            order, _ = peer.queue.head
            rank = urgency(order), peer.turn, peer.place
            if least is None or rank < least:
                chosen, least = peer, rank
        if chosen is None:
            return None
        queue = chosen.queue
        if not queue.in_flight:
            if sum(not peer.held for peer in self._busy.values()) >= self.breadth:
                return None  # when one of them has got its own; more for them meanwhile would only take longer
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
        """Give back the credit of one item of *nbytes*: its bytes have reached *peer*."""
        queue = self._peers[peer].queue
        queue.release(nbytes)
        if not queue.in_flight:
            del self._busy[peer]

    def hold(self, peer: int) -> None:
        """Send nothing more to *peer* until `resume`. Any thread."""
        self._peers[peer].held = True

    def remove(self, peer: int) -> None:
        """Forget *peer*, and all that waits for it or is under way to it."""
        for found in (self._peers, self._waiting, self._busy):
            found.pop(peer, None)
        self._weigh({index: each.share_nbytes for index, each in self._peers.items()})

    def is_held(self, peer: int) -> bool:
        """Whether nothing is sent to *peer*."""
        return self._peers[peer].held

    def resume(self, peer: int) -> None:
        """Go on with *peer*: what was under way is forgotten, nobody will say any more that it has arrived."""
        found = self._peers[peer]
        self._busy.pop(peer, None)
        found.queue.forget_in_flight()
        found.held = False
