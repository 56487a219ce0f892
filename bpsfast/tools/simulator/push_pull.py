"""Simulated push and pull through summation services: partial sums to their owners, results back, as nodes send them.

The job's own `NicQueue` and `WriteOrder` decide which write leaves next, and its own placement (`partition_layout`)
decides the owners. The wire, the sums and the inside of machines are simulated.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...orchestration.priority.send_queue import ArrivalOrder, CreditQueue, NicQueue, WriteOrder
from .network import Clock, Costs, Load, Network
from .partition_layout import Layout, LayoutPart

#: Called with (worker, unit) when the complete sum of a unit has reached a worker.
Done = Callable[[int, int], None]


class _Write(NamedTuple):
    part: LayoutPart
    is_result: bool

    @property
    def load(self) -> Load:
        return self.part.result if self.is_result else self.part.push

    @property
    def nbytes(self) -> int:
        """The bytes that count towards the credit."""
        return int(max(self.load.tx_nbytes, self.load.rx_nbytes))


class Stage:
    """A stage that processes one partition after another at a rate, most urgent first; no time at rate inf."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self._clock = clock
        self._rate = rate
        self._queue: CreditQueue[tuple[float, Callable[[], None]]] = CreditQueue(0)  # one at a time: no credit

    def put(self, nbytes: float, order: int, key: int, then: Callable[[], None]) -> None:
        """Process *nbytes* in turn, then call *then*."""
        if math.isinf(self._rate):
            then()
            return
        self._queue.put((nbytes, then), order=order, key=key, nbytes=1)
        self._begin()

    def _begin(self) -> None:
        item = self._queue.pop()
        if item is not None:
            self._clock.at(self._clock.now + item[0] / self._rate, self._end, item[1])

    def _end(self, then: Callable[[], None]) -> None:
        self._queue.release(1)
        then()
        self._begin()


class SimulatedPushPull:
    """Communication and summation services of a cluster.

    At most *credit_nbytes* are in flight from one machine to another. *priority*: send what the next forward pass needs
    first; else, to each machine, in order of arrival. *done* is called when a unit's sum has reached a worker.
    """

    def __init__(self, clock: Clock, layout: Layout, costs: Costs, *, credit_nbytes: int, priority: bool,
                 done: Done) -> None:
        self._clock, self._layout, self._costs, self._priority, self._done = clock, layout, costs, priority, done
        self._arrivals = 0
        self.network = Network(clock, [machine.rate for machine in layout.machines], costs)
        self._workers = [m for m, machine in enumerate(layout.machines) if machine.has_ranks]
        self._reduce = {w: Stage(clock, costs.reduce_rate) for w in self._workers}
        self._broadcast = {w: Stage(clock, costs.broadcast_rate) for w in self._workers}
        # a folded transfer stands for those to all peers, and has the credit of all
        self._cards = self._queues(credit_nbytes * layout.fold)
        self._orders = [WriteOrder() if priority else ArrivalOrder() for _ in layout.machines]
        self._inputs = [0] * len(layout.parts)
        self._sum_free_s = [0.0] * len(layout.machines)
        self._left = {(w, u): len(parts) for w in self._workers for u, parts in enumerate(layout.parts_of_unit)}
        self.summed_nbytes = 0.0

    def _queues(self, credit_nbytes: int) -> list[NicQueue[_Write]]:
        n = len(self._layout.machines)
        shares: list[dict[int, float]] = [{} for _ in range(n)]
        for part in self._layout.parts:
            for worker in self._workers:
                if worker != part.owner or part.own is not None:
                    for sender, receiver, load in ((worker, part.owner, part.push), (part.owner, worker, part.result)):
                        shares[sender][receiver] = shares[sender].get(receiver, 0.0) + load.tx_nbytes
        queues = []
        for sender, planned in enumerate(shares):
            queue: NicQueue[_Write] = NicQueue(credit_nbytes)
            for receiver in planned:
                queue.add(receiver, (receiver - sender) % n)
            queue.plan({receiver: int(nbytes) for receiver, nbytes in planned.items()})
            queues.append(queue)
        return queues

    def gradient_ready(self, worker: int, unit: int) -> None:
        """Accept the gradients of *unit* on the machine of *worker*."""
        reduce = self._reduce[worker]
        for index in self._layout.parts_of_unit[unit]:
            part = self._layout.parts[index]
            reduce.put(self._on_machine(part), self._urgency(part), part.key,
                       functools.partial(self._partial, worker, part))

    def _on_machine(self, part: LayoutPart) -> float:
        """Return the bytes of *part* on one worker; a folded part stands for shares of several owners."""
        if self._layout.fold == 1:
            return part.nbytes
        return part.nbytes * self._layout.fold if part.owner == 0 else part.push.tx_nbytes

    def _urgency(self, part: LayoutPart) -> int:
        if self._priority:
            return self._layout.order[part.first]
        self._arrivals += 1
        return self._arrivals

    def _partial(self, worker: int, part: LayoutPart) -> None:
        """Send the machine's partial sum to the owner."""
        if worker == part.owner and part.own is None:
            self._arrived(part)
        else:
            self._send(worker, [part.owner], _Write(part, is_result=False))

    def _arrived(self, part: LayoutPart) -> None:
        """Count an input at the owner, which sums when all are there, or each on arrival."""
        owner, costs, now = part.owner, self._costs, self._clock.now
        self._inputs[part.key] += 1
        last = self._inputs[part.key] == part.n_inputs
        if not costs.fused_sum or last:
            nbytes = part.sum_nbytes if costs.fused_sum else part.sum_nbytes / part.n_inputs
            self._sum_free_s[owner] = max(now, self._sum_free_s[owner]) + nbytes / costs.sum_rate
        if last:
            self._inputs[part.key] = 0
            self.summed_nbytes += part.sum_nbytes
            self._clock.at(self._sum_free_s[owner], self._summed, part)

    def _summed(self, part: LayoutPart) -> None:
        if part.owner in self._workers and part.own is None:
            self._result(part.owner, part)
        self._send(part.owner, [worker for worker in self._workers if worker != part.owner or part.own is not None],
                   _Write(part, is_result=True))

    def _result(self, worker: int, part: LayoutPart) -> None:
        self._broadcast[worker].put(self._on_machine(part), self._urgency(part), part.key,
                                    functools.partial(self._complete, worker, part.unit))

    def _complete(self, worker: int, unit: int) -> None:
        self._left[worker, unit] -= 1
        if not self._left[worker, unit]:
            self._left[worker, unit] = len(self._layout.parts_of_unit[unit])
            self._done(worker, unit)

    def _send(self, sender: int, receivers: Sequence[int], write: _Write) -> None:
        part = write.part
        key = part.key << 1 | write.is_result  # folded: one machine stands for the owner and for those who push
        order, key = self._orders[sender].enter(key, self._layout.order[part.first], write.is_result,
                                                self._cards[sender].first_order)
        for receiver in receivers:
            self._cards[sender].put(receiver, write, order=order, key=key, nbytes=write.nbytes)
        self._pump(sender)

    def _pump(self, sender: int) -> None:
        while (found := self._cards[sender].pop()) is not None:
            receiver, write = found
            self.network.post(sender, receiver, write.load, functools.partial(self._delivered, sender, receiver, write))

    def _delivered(self, sender: int, receiver: int, write: _Write) -> None:
        self.network.answer(receiver, sender, functools.partial(self._acknowledged, sender, receiver, write))
        if write.is_result:
            self._result(receiver, write.part)
        else:
            self._arrived(write.part)

    def _acknowledged(self, sender: int, receiver: int, write: _Write) -> None:
        self._cards[sender].release(receiver, write.nbytes)
        self._pump(sender)
