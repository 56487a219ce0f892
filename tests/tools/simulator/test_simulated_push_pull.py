"""Stages and summation services: order, inputs, credit."""
from __future__ import annotations

import math

import pytest

from bpsfast.tools.simulator.network import Clock, Costs, uniform
from bpsfast.tools.simulator.partition_layout import full
from bpsfast.tools.simulator.push_pull import SimulatedPushPull, Stage
from bpsfast.tools.simulator.workload import Layer, partitioned, workload


def test_a_stage_takes_the_most_urgent_next_and_one_at_a_time() -> None:
    clock, seen = Clock(), []
    stage = Stage(clock, 10.0)
    for order in (3, 2, 1):
        stage.put(10.0, order, 0, lambda order=order: seen.append((order, clock.now)))
    clock.run()
    assert seen == [(3, 1.0), (1, 2.0), (2, 3.0)]


def test_an_endless_rate_costs_nothing() -> None:
    seen: list[int] = []
    Stage(Clock(), math.inf).put(10.0, 0, 0, lambda: seen.append(1))
    assert seen == [1]


def exchanged(costs: Costs, credit_nbytes: int = 1 << 30, n: int = 2) -> list[tuple[int, float]]:
    """*n* workers push two tensors of 4096 bytes, the second first; return (unit, when it was whole on worker 0)."""
    job = workload("w", [Layer("a", 0, 0, ("a",)), Layer("b", 0, 0, ("b",))], {"a": (1024,), "b": (1024,)})
    plan = partitioned(job, 4096)
    machines = uniform(n, 1, 4096.0, costs)
    clock, seen = Clock(), []
    exchange = SimulatedPushPull(clock, full(machines, plan, "ps"), costs, credit_nbytes=credit_nbytes, priority=True,
                        done=lambda w, unit: seen.append((unit, clock.now)) if w == 0 else None)
    for worker in range(n):
        for unit in (1, 0):
            exchange.gradient_ready(worker, unit)
    clock.run()
    return seen


def test_a_sum_waits_for_all_inputs() -> None:
    # the helper takes in four tensors, one a second; the first sum is complete after two
    assert exchanged(Costs()) == [(1, 3.0), (0, 5.0)]


@pytest.mark.parametrize(("fused", "first_s"), [(True, 4.0), (False, 3.5)])
def test_a_fused_sum_begins_with_the_last_input(fused: bool, first_s: float) -> None:
    assert exchanged(Costs(sum_rate=8192.0, fused_sum=fused))[0] == (1, first_s)


def test_less_credit_than_a_partition_is_slow_and_no_deadlock() -> None:
    # the second tensor leaves when the first is acknowledged: two latencies after its last byte left
    assert exchanged(Costs(latency_s=0.5), n=1) == [(1, 3.0), (0, 4.0)]
    assert exchanged(Costs(latency_s=0.5), credit_nbytes=1, n=1) == [(1, 3.0), (0, 5.0)]
