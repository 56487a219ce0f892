"""The bulk exchange of `bpsfast.tools.simulator` as SimPy processes: an oracle that shares no code with it.

A process for each card's sending direction serves the connections in turn; one for each card's receiving direction
takes messages in the order of their first bytes. There is no credit, priority or computing: all partials are ready at
the start.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import simpy


def bulk_s(nbytes_of: Sequence[int], owners: Sequence[int], n_workers: int, rates: Sequence[float], overhead_s: float,
           latency_s: float) -> float:
    """Return the time at which the last worker has the last sum."""
    env = simpy.Environment()
    waiting: list[dict[int, deque]] = [{} for _ in rates]
    turns: list[deque[int]] = [deque() for _ in rates]
    woken = [env.event() for _ in rates]
    arriving = [simpy.Store(env) for _ in rates]
    inputs = [0] * len(nbytes_of)
    n_left = len(nbytes_of) * n_workers
    finished = env.event()

    def post(sender: int, receiver: int, part: int, is_result: bool) -> None:
        connection = waiting[sender].setdefault(receiver, deque())
        if not connection:
            turns[sender].append(receiver)
        connection.append((part, is_result))
        if not woken[sender].triggered:
            woken[sender].succeed()

    def complete() -> None:
        nonlocal n_left
        n_left -= 1
        if not n_left:
            finished.succeed()

    def arrived(part: int) -> None:
        inputs[part] += 1
        if inputs[part] == n_workers:
            for worker in range(n_workers):
                if worker == owners[part]:
                    complete()
                else:
                    post(owners[part], worker, part, True)

    def last_byte(part: int, is_result: bool, sent, received):
        yield sent & received
        yield env.timeout(0)
        complete() if is_result else arrived(part)

    def sender(machine: int):
        while True:
            while turns[machine]:
                receiver = turns[machine].popleft()
                part, is_result = waiting[machine][receiver].popleft()
                if waiting[machine][receiver]:
                    turns[machine].append(receiver)
                busy_s = overhead_s + nbytes_of[part] / rates[machine]
                sent, received = env.timeout(busy_s + latency_s), env.event()
                env.process(first_byte(receiver, part, received))
                env.process(last_byte(part, is_result, sent, received))
                yield env.timeout(busy_s)
            woken[machine] = env.event()
            if not turns[machine]:
                yield woken[machine]

    def first_byte(receiver: int, part: int, received):
        yield env.timeout(latency_s)
        arriving[receiver].put((part, received))

    def receiving(machine: int):
        while True:
            part, received = yield arriving[machine].get()
            yield env.timeout(overhead_s + nbytes_of[part] / rates[machine])
            received.succeed()

    for machine in range(len(rates)):
        env.process(sender(machine))
        env.process(receiving(machine))
    for worker in range(n_workers):
        for part, owner in enumerate(owners):
            if worker == owner:
                arrived(part)
            else:
                post(worker, owner, part, False)
    env.run(until=finished)
    return env.now
