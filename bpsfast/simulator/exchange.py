"""Push and pull through summation services: partials to their owners, sums back, as `node.dispatch` decides it.

Which write leaves next to one machine is the job's own `CreditQueue`, with the job's own orders; who owns what is the
job's own placement (`layout`). Whose turn it is on a card is the simulated `network`'s affair (`one_queue`), not yet
the job's `card_queue`. Wire, sums and the machine's inside are simulated.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from ..orchestration.credit_queue import CreditQueue, write_order
from .clock import Clock
from .cluster import Costs
from .layout import Layout, Part
from .network import Load, Network

#: Called with (worker, unit) when the whole sum of a unit is on a worker.
Done = Callable[[int, int], None]


class _Write(NamedTuple):
    part: Part
    is_result: bool
    order: int


class Stage:
    """Something a machine does to one partition after another at a rate: most urgent first. None to do at rate inf."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self._clock = clock
        self._rate = rate
        self._queue: CreditQueue[tuple[float, Callable[[], None]]] = CreditQueue(0)  # no credit: one at a time

    def put(self, nbytes: float, order: int, key: int, then: Callable[[], None]) -> None:
        """Work through *nbytes* when it is their turn, then call *then*."""
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


class Exchange:
    """All communication and summation services of a cluster.

    Parameters
    ----------
    credit_nbytes
        Bytes under way from one machine to another.
    priority
        Send what the next forward needs first; else what was there first.
    one_queue
        See `Network`.
    done
        Called when a unit's sum has reached a worker.
    """

    def __init__(self, clock: Clock, layout: Layout, costs: Costs, *, credit_nbytes: int, priority: bool,
                 one_queue: bool, done: Done) -> None:
        self._clock = clock
        self._layout = layout
        self._costs = costs
        self._priority = priority
        self._done = done
        self._arrivals = 0
        rates = [machine.rate for machine in layout.machines]
        self.network = Network(clock, rates, costs.overhead_s, costs.latency_s, one_queue)
        # A transfer that stands for those to all peers has the credit of all of them.
        self._credit_nbytes = credit_nbytes * layout.fold
        self._queues: dict[tuple[int, int], CreditQueue[_Write]] = {}
        self._workers = [m for m, machine in enumerate(layout.machines) if machine.has_ranks]
        self._reduce = {w: Stage(clock, costs.reduce_rate) for w in self._workers}
        self._broadcast = {w: Stage(clock, costs.broadcast_rate) for w in self._workers}
        self._inputs = [0] * len(layout.parts)
        self._sum_free_s = [0.0] * len(layout.machines)
        self._left = {(w, u): len(parts) for w in self._workers for u, parts in enumerate(layout.parts_of_unit)}
        self.summed_nbytes = 0.0

    def gradient_ready(self, worker: int, unit: int) -> None:
        """Take the gradients of *unit* of *worker*'s machine."""
        reduce = self._reduce[worker]
        for index in self._layout.parts_of_unit[unit]:
            part = self._layout.parts[index]
            reduce.put(self._on_machine(part), self._order(part, False), part.key,
                       functools.partial(self._partial, worker, part))

    def _on_machine(self, part: Part) -> float:
        """Return the bytes of *part* on one worker: a folded part stands for a share of each of several owners."""
        if self._layout.fold == 1:
            return part.nbytes
        return part.nbytes * self._layout.fold if part.owner == 0 else part.push.tx_nbytes

    def _order(self, part: Part, is_result: bool) -> int:
        if self._priority:
            return write_order(self._layout.order, part.first, is_result)
        self._arrivals += 1
        return self._arrivals

    def _partial(self, worker: int, part: Part) -> None:
        """The machine's partial sum is there: to the owner with it."""
        if worker != part.owner:
            self._put(worker, part.owner, part, is_result=False)
        elif part.own is None:
            self._arrived(part)
        else:
            self._put(worker, worker, part, is_result=False)

    def _arrived(self, part: Part) -> None:
        """One input is at the owner, which sums when it has all of them, or each as it comes."""
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

    def _summed(self, part: Part) -> None:
        for worker in self._workers:
            if worker != part.owner:
                self._put(part.owner, worker, part, is_result=True)
            elif part.own is None:
                self._result(worker, part)
            else:
                self._put(worker, worker, part, is_result=True)

    def _result(self, worker: int, part: Part) -> None:
        """A sum is on a worker's machine."""
        self._broadcast[worker].put(self._on_machine(part), self._order(part, True), part.key,
                                    functools.partial(self._complete, worker, part.unit))

    def _complete(self, worker: int, unit: int) -> None:
        self._left[worker, unit] -= 1
        if not self._left[worker, unit]:
            self._left[worker, unit] = len(self._layout.parts_of_unit[unit])
            self._done(worker, unit)

    def _put(self, sender: int, receiver: int, part: Part, is_result: bool) -> None:
        queue = self._queues.get((sender, receiver))
        if queue is None:
            queue = self._queues[sender, receiver] = CreditQueue(self._credit_nbytes)
        load = self._load(part, is_result)
        order = self._order(part, is_result)
        queue.put(_Write(part, is_result, order), order=order, key=part.key,
                  nbytes=int(max(load.tx_nbytes, load.rx_nbytes)))
        self._pump(sender, receiver, queue)

    @staticmethod
    def _load(part: Part, is_result: bool) -> Load:
        return part.result if is_result else part.push

    def _pump(self, sender: int, receiver: int, queue: CreditQueue[_Write]) -> None:
        while (write := queue.pop()) is not None:
            # A partial that waits keeps a sum from all workers, a result only itself from one.
            self.network.post(sender, receiver, self._load(write.part, write.is_result), (write.is_result, write.order),
                              functools.partial(self._delivered, sender, receiver, write))

    def _delivered(self, sender: int, receiver: int, write: _Write) -> None:
        part, is_result, _ = write
        if self._costs.latency_s:
            self._clock.at(self._clock.now + self._costs.latency_s, self._acknowledged, sender, receiver, write)
        else:
            self._acknowledged(sender, receiver, write)
        if is_result:
            self._result(receiver, part)
        else:
            self._arrived(part)

    def _acknowledged(self, sender: int, receiver: int, write: _Write) -> None:
        load = self._load(write.part, write.is_result)
        queue = self._queues[sender, receiver]
        queue.release(int(max(load.tx_nbytes, load.rx_nbytes)))
        self._pump(sender, receiver, queue)

