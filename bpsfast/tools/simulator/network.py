"""The simulated network: time, machines with their cards, and the fabric between them.

Each direction of a card is a resource that processes messages one after another at its rate. Connections of a card take
turns partition by partition, as RDMA queue pairs and TCP streams share a link (at a coarser grain); within a connection
messages stay in order. A receiver queues messages by the arrival of their first byte. A message starts to arrive while
it is still leaving, so an idle path costs bytes / rate once.

Why serial instead of max-min fair rates of all flows: what counts is when the *last* of n inputs has arrived, and both
ends work whenever they have something in either model. The difference is less than one partition, and a message costs
two events instead of new rates for all flows. Bytes between two ends wait in the fabric, at most the sender's credit,
as in lossless fabrics and TCP windows. An answer tells the sender that bytes have arrived; it may wait behind bytes of
the other direction (`Costs.queued_answers`).
"""
from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...orchestration.errors import ConfigError
from ...orchestration.placement.shares import Machine


class Clock:
    """Simulated time (`now`, seconds) and planned events, without hashes, threads or real time. Owner thread only."""

    def __init__(self) -> None:
        self.now = 0.0
        self.n_events = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call *action* with *arguments* at *time_s*, which must not be in the past."""
        if not time_s >= self.now:
            raise ValueError(f"an event at {time_s} s was planned at {self.now} s: time does not run backwards")
        self._number += 1
        heapq.heappush(self._planned, (time_s, self._number, action, arguments))

    def run(self) -> None:
        """Run events until none is planned."""
        planned, pop = self._planned, heapq.heappop
        while planned:
            self.now, _, action, arguments = pop(planned)
            self.n_events += 1
            action(*arguments)

#: Most machines; more are a typing error, or need a coarser model.
MAX_MACHINES = 65536


class Costs(NamedTuple):
    """Costs of machines and messages besides bytes on the wire. Rates are in bytes/s, `inf` costs nothing.

    `overhead_s`: time that a message occupies a direction of a network card, at both ends.
    `latency_s`: time between two machines, in the wire and the switch; occupies nothing.
    `sum_rate`: bytes of inputs that an owner sums per second.
    `fused_sum`: sum a partition in one pass when all inputs are there, as our engine does; else each input on arrival,
    as BytePS does.
    `reduce_rate`, `broadcast_rate`: bytes of one gradient per second that a machine reduces over its accelerators, or
    broadcasts to them; a stage of the pipeline, one partition at a time, most urgent first. For BytePS's layouts see
    `bench.paper.intra_machine`.
    `queued_answers`: answers wait behind the bytes of the other direction at both cards, as TCP acknowledgements do on
    a card with one queue; else they take `latency_s`.
    `burst_nbytes`: bytes that an idle direction of a card may send at once, if a shaper (tbf) is the limit.
    """

    overhead_s: float = 0.0
    latency_s: float = 0.0
    sum_rate: float = math.inf
    fused_sum: bool = True
    reduce_rate: float = math.inf
    broadcast_rate: float = math.inf
    queued_answers: bool = False
    burst_nbytes: float = 0.0


#: Only bytes on the wire cost time.
FREE = Costs()


class Cluster(NamedTuple):
    """Machines in node order, those with ranks first; `rate` of each in bytes/s per direction."""

    machines: tuple[Machine, ...]
    costs: Costs = FREE

    @property
    def n_workers(self) -> int:
        """Number of machines with ranks."""
        return sum(machine.has_ranks for machine in self.machines)

    @property
    def n_helpers(self) -> int:
        """Number of machines that only sum."""
        return len(self.machines) - self.n_workers

    @property
    def is_uniform(self) -> bool:
        """Tell whether all workers have one rate, and all helpers one."""
        return len({*self.machines}) <= (2 if self.n_helpers else 1)


def cluster(worker_rates: Sequence[float], helper_rates: Sequence[float] = (), costs: Costs = FREE) -> Cluster:
    """Return a cluster (rates in bytes/s); raise `ConfigError` for no worker, too many machines, invalid numbers."""
    if not worker_rates:
        raise ConfigError("a cluster needs at least one machine with ranks, got none")
    n = len(worker_rates) + len(helper_rates)
    if n > MAX_MACHINES:
        raise ConfigError(f"a cluster of {n} machines is not simulated; at most {MAX_MACHINES} are")
    for role, rates in (("worker", worker_rates), ("helper", helper_rates)):
        for i, rate in enumerate(rates):
            if not 0 < rate < math.inf:
                raise ConfigError(f"{role} {i} has a NIC of {rate} bytes/s; a rate must be above zero and finite")
    for name, unit in (("overhead_s", "seconds"), ("latency_s", "seconds"), ("burst_nbytes", "bytes")):
        if not 0 <= getattr(costs, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(costs, name)}; it must be zero or more {unit}")
    for name in ("sum_rate", "reduce_rate", "broadcast_rate"):
        if not getattr(costs, name) > 0:
            raise ConfigError(f"{name} is {getattr(costs, name)} bytes/s; it must be above zero (inf: costs nothing)")
    machines = (*(Machine(True, float(rate)) for rate in worker_rates),
                *(Machine(False, float(rate)) for rate in helper_rates))
    return Cluster(machines, costs)


def uniform(n_workers: int, n_helpers: int, rate: float, costs: Costs = FREE) -> Cluster:
    """Return a cluster of *n_workers* and *n_helpers* with equal cards of *rate* bytes/s."""
    if n_workers < 1 or n_helpers < 0:
        raise ConfigError(f"a cluster needs one worker or more and no negative number of helpers, got {n_workers} and "
                          f"{n_helpers}")
    if n_workers + n_helpers > MAX_MACHINES:
        raise ConfigError(f"a cluster of {n_workers + n_helpers} machines is not simulated; at most {MAX_MACHINES} are")
    return cluster([rate] * n_workers, [rate] * n_helpers, costs)


class Load(NamedTuple):
    """The cost of a transfer at both ends; several messages if it stands for transfers of many equal machines."""

    tx_nbytes: float
    rx_nbytes: float
    n_tx: float = 1
    n_rx: float = 1


Delivered = Callable[[], None]


class _Direction:
    """One direction of a card, with the time at which it has processed everything given to it."""

    def __init__(self, rate: float, burst_nbytes: float) -> None:
        self._rate = rate
        self._burst_s = burst_nbytes / rate
        self._done_s = 0.0  # no burst is saved up for the first message, because steps follow one another
        self.nbytes = 0.0

    def take(self, at_s: float, nbytes: float, overhead_s: float) -> float:
        """Process *nbytes* that start to arrive at *at_s*, after idle time in a burst; return the time of the end."""
        self._done_s = max(at_s - self._burst_s, self._done_s) + overhead_s + nbytes / self._rate
        self.nbytes += nbytes
        return max(at_s, self._done_s)

    def passed(self, at_s: float) -> float:
        """Return when something without bytes that arrives at *at_s* has passed everything before it."""
        return max(at_s, self._done_s)


class SimulatedNic:
    """The network card of a machine. `queue` holds what waits to leave and what is leaving, for `Network.answer`."""

    def __init__(self, rate: float, burst_nbytes: float) -> None:
        self.tx, self.rx, self.queue = (_Direction(rate, burst_nbytes) for _ in range(3))
        self.sending = False
        self.connections: defaultdict[int, deque[tuple[Load, Delivered]]] = defaultdict(deque)
        self.turns: deque[int] = deque()


class Network:
    """The cards of a cluster, connected by a fabric without blocking. `costs` are those of the cluster."""

    def __init__(self, clock: Clock, rates: Sequence[float], costs: Costs) -> None:
        self._clock = clock
        self._costs = costs
        self.cards = [SimulatedNic(rate, costs.burst_nbytes) for rate in rates]

    def post(self, sender: int, receiver: int, load: Load, delivered: Delivered) -> None:
        """Send *load*; call *delivered* when its last byte has arrived."""
        card = self.cards[sender]
        card.queue.take(self._clock.now, load.tx_nbytes, load.n_tx * self._costs.overhead_s)
        waiting = card.connections[receiver]
        if not waiting:
            card.turns.append(receiver)
        waiting.append((load, delivered))
        if not card.sending:
            self._send(card)

    def answer(self, sender: int, receiver: int, heard: Delivered) -> None:
        """Notify *receiver* of something without bytes; call *heard* when it arrives."""
        now, latency_s = self._clock.now, self._costs.latency_s
        if self._costs.queued_answers:
            self._clock.at(self.cards[sender].queue.passed(now), lambda: self._clock.at(
                self.cards[receiver].rx.passed(self._clock.now + latency_s), heard))
        elif latency_s:
            self._clock.at(now + latency_s, heard)
        else:
            heard()

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
        # capacity of a fast card that a slow sender cannot use is free for others
        there_s = self.cards[receiver].rx.take(now + costs.latency_s, load.rx_nbytes, load.n_rx * costs.overhead_s)
        self._clock.at(left_s, self._send, card)
        self._clock.at(max(left_s + costs.latency_s, there_s), delivered)
