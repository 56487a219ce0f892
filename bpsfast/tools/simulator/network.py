"""Network cards and the fabric between them: when a message has left, and when it is there.

Each direction of a card is one resource that works through messages one after another at its rate. Connections of a
card take turns, partition by partition, as RDMA queue pairs and TCP streams share a link (round robin and fair
queueing, at a coarser grain); within a connection messages stay in order. At the receiver they queue by when their
first byte comes. A message begins to arrive while it still leaves, so that a free path costs bytes / rate once.

Why serial, and not all flows at once at max-min fair rates: the moments that count are those when the *last* of n
inputs has arrived, and both ends work whenever they have something, in either model; they differ by less than one
partition, and here a message costs two events instead of new rates for all flows. Bytes between the two ends wait in
the fabric, no more of them than the sender's credit: lossless fabrics and TCP windows bound them alike. That bytes have
arrived the sender hears by an answer, which may wait behind the bytes of the other direction (`Costs.queued_answers`).
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .cluster import Costs
from .event_clock import Clock


class Load(NamedTuple):
    """What a transfer costs both ends: more than one message if it stands for transfers of many equal machines."""

    tx_nbytes: float
    rx_nbytes: float
    n_tx: float = 1
    n_rx: float = 1


Delivered = Callable[[], None]


class _Direction:
    """One direction of a card: when it has worked through what it was given."""

    def __init__(self, rate: float, burst_nbytes: float) -> None:
        self._rate = rate
        self._burst_s = burst_nbytes / rate
        self._done_s = 0.0  # nothing is saved up for the first message: steps follow one another
        self.nbytes = 0.0

    def take(self, at_s: float, nbytes: float, overhead_s: float) -> float:
        """Work through *nbytes* that begin to come at *at_s*; return when that will be done.

        A shaper counts what it may still send: after an idle time it makes up for up to a burst.
        """
        self._done_s = max(at_s - self._burst_s, self._done_s) + overhead_s + nbytes / self._rate
        self.nbytes += nbytes
        return max(at_s, self._done_s)

    def passed(self, at_s: float) -> float:
        """Return when what takes no time, and comes at *at_s*, is through: behind everything taken before."""
        return max(at_s, self._done_s)


class SimulatedNic:
    """One machine's network card. `queue`: both what waits to leave and what leaves now, for `Network.answer`."""

    def __init__(self, rate: float, burst_nbytes: float) -> None:
        self.tx = _Direction(rate, burst_nbytes)
        self.rx = _Direction(rate, burst_nbytes)
        self.queue = _Direction(rate, burst_nbytes)
        self.sending = False
        self.connections: dict[int, deque[tuple[Load, Delivered]]] = {}
        self.turns: deque[int] = deque()


class Network:
    """All cards of a cluster, joined by a fabric that blocks nobody. `costs`: as `cluster.Costs` says."""

    def __init__(self, clock: Clock, rates: Sequence[float], costs: Costs) -> None:
        self._clock = clock
        self._costs = costs
        self.cards = [SimulatedNic(rate, costs.burst_nbytes) for rate in rates]

    def post(self, sender: int, receiver: int, load: Load, delivered: Delivered) -> None:
        """Send *load*; *delivered* is called when its last byte has arrived."""
        card = self.cards[sender]
        card.queue.take(self._clock.now, load.tx_nbytes, load.n_tx * self._costs.overhead_s)
        waiting = card.connections.get(receiver)
        if waiting is None:
            waiting = card.connections[receiver] = deque()
        if not waiting:
            card.turns.append(receiver)
        waiting.append((load, delivered))
        if not card.sending:
            self._send(card)

    def answer(self, sender: int, receiver: int, heard: Delivered) -> None:
        """Let *receiver* know something that takes no bytes; *heard* is called when it does."""
        now, latency_s = self._clock.now, self._costs.latency_s
        if self._costs.queued_answers:
            self._clock.at(self.cards[sender].queue.passed(now), self._arrive, receiver, heard)
        elif latency_s:
            self._clock.at(now + latency_s, heard)
        else:
            heard()

    def _arrive(self, receiver: int, heard: Delivered) -> None:
        self._clock.at(self.cards[receiver].rx.passed(self._clock.now + self._costs.latency_s), heard)

    def _send(self, card: SimulatedNic) -> None:
        if not card.turns:
            card.sending = False
            return
        receiver = card.turns.popleft()
        waiting = card.connections[receiver]
        load, delivered = waiting.popleft()
        if waiting:
            card.turns.append(receiver)
        card.sending = True
        now, costs = self._clock.now, self._costs
        left_s = card.tx.take(now, load.tx_nbytes, load.n_tx * costs.overhead_s)
        # What a faster card could still take in while a slow one sends is not lost: it is free for others.
        there_s = self.cards[receiver].rx.take(now + costs.latency_s, load.rx_nbytes, load.n_rx * costs.overhead_s)
        self._clock.at(left_s, self._send, card)
        self._clock.at(max(left_s + costs.latency_s, there_s), delivered)
