"""Network cards and the fabric between them: when a message has left, and when it is there.

Each direction of a card is one resource that works through messages one after another at its rate. Connections of a
card take turns, partition by partition, as RDMA queue pairs and TCP streams share a link (round robin and fair
queueing, at a coarser grain); within a connection messages stay in order. At the receiver they queue by when their
first byte comes. A message begins to arrive while it still leaves, so that a free path costs bytes / rate once.

Why serial, and not all flows at once at max-min fair rates: the moments that count are those when the *last* of n
inputs has arrived, and both ends work whenever they have something, in either model; they differ by less than one
partition, and here a message costs two events instead of new rates for all flows. Bytes between the two ends wait in
the fabric, no more of them than the sender's credit: lossless fabrics and TCP windows bound them alike.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .clock import Clock


class Load(NamedTuple):
    """What a transfer costs both ends: more than one message if it stands for transfers of many equal machines."""

    tx_nbytes: float
    rx_nbytes: float
    n_tx: float = 1
    n_rx: float = 1


Delivered = Callable[[], None]


class Card:
    """One machine's network card: what waits to leave, when the receiving direction is free, bytes moved so far."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.tx_nbytes = self.rx_nbytes = 0.0
        self.tx_busy_s = self.rx_busy_s = 0.0
        self.sending = False
        self.rx_free_s = 0.0
        self.connections: dict[int, deque[tuple[Load, Delivered]]] = {}
        self.turns: deque[int] = deque()


class Network:
    """All cards of a cluster, joined by a fabric that blocks nobody."""

    def __init__(self, clock: Clock, rates: Sequence[float], overhead_s: float, latency_s: float) -> None:
        self._clock = clock
        self.cards = [Card(rate) for rate in rates]
        self._overhead_s = overhead_s
        self._latency_s = latency_s

    def post(self, sender: int, receiver: int, load: Load, delivered: Delivered) -> None:
        """Send *load*; *delivered* is called when its last byte has arrived."""
        card = self.cards[sender]
        waiting = card.connections.get(receiver)
        if waiting is None:
            waiting = card.connections[receiver] = deque()
        if not waiting:
            card.turns.append(receiver)
        waiting.append((load, delivered))
        if not card.sending:
            self._send(card)

    def _send(self, card: Card) -> None:
        if not card.turns:
            card.sending = False
            return
        receiver = card.turns.popleft()
        waiting = card.connections[receiver]
        load, delivered = waiting.popleft()
        if waiting:
            card.turns.append(receiver)
        card.sending = True
        now = self._clock.now
        tx_s = load.n_tx * self._overhead_s + load.tx_nbytes / card.rate
        peer = self.cards[receiver]
        rx_s = load.n_rx * self._overhead_s + load.rx_nbytes / peer.rate
        # What a faster card could still take in while a slow one sends is not lost: it is free for others.
        peer.rx_free_s = max(now + self._latency_s, peer.rx_free_s) + rx_s
        card.tx_nbytes += load.tx_nbytes
        peer.rx_nbytes += load.rx_nbytes
        card.tx_busy_s += tx_s
        peer.rx_busy_s += rx_s
        self._clock.at(now + tx_s, self._send, card)
        self._clock.at(max(now + tx_s + self._latency_s, peer.rx_free_s), delivered)
