"""The ring's closed form, its fusion buffers and its cycles."""
from __future__ import annotations

import pytest

from bpsfast.tools.simulator.all_reduce import Ring, RingAllReduce, reduce_s, wire_nbytes
from bpsfast.tools.simulator.network import Clock, Costs, cluster, uniform


def test_lock_steps_take_the_slowest_cards_time() -> None:
    assert reduce_s(400, cluster([10, 20, 40, 5]), Ring()) == pytest.approx(2 * 3 * 100 / 5)
    assert reduce_s(400, uniform(1, 0, 10.0), Ring()) == 0.0
    assert reduce_s(800, uniform(4, 0, 10.0), Ring(ranks_per_machine=2)) == pytest.approx(2 * 7 * 100 / 10)
    assert reduce_s(800, uniform(4, 0, 10.0), Ring(inside_rate=5.0)) == pytest.approx(2 * 3 * 200 / 5)


def test_every_slice_costs_an_overhead_and_every_step_the_latency() -> None:
    machines = uniform(2, 0, 10.0, Costs(latency_s=3.0))
    assert reduce_s(400, machines, Ring(slice_nbytes=90, overhead_s=1.0)) == pytest.approx(2 * (3 * 1.0 + 3.0 + 20))


def test_a_card_carries_the_same_for_any_number_of_machines_of_many_ranks() -> None:
    assert wire_nbytes(1000, uniform(4, 0, 1.0), Ring()) == 1500
    assert wire_nbytes(1600, uniform(4, 0, 1.0), Ring(ranks_per_machine=2)) == 2800
    assert wire_nbytes(1600, uniform(1, 0, 1.0), Ring(ranks_per_machine=2)) == 0


@pytest.mark.parametrize(("fusion", "expected"), [(0, [1.0, 2.0, 4.0]), (200, [2.0, 2.0, 4.0]),
                                                 (10_000, [4.0, 4.0, 4.0])])
def test_tensors_that_fit_a_buffer_are_reduced_together(fusion: int, expected: list[float]) -> None:
    clock, done = Clock(), [0.0] * 3
    ring = RingAllReduce(clock, uniform(2, 0, 100.0), Ring(fusion_nbytes=fusion, cycle_s=0.0), [100, 100, 200],
                        lambda worker, unit: done.__setitem__(unit, clock.now))
    for unit in range(3):
        ring.gradient_ready(0, unit)
    clock.run()
    assert done == pytest.approx(expected)


def test_a_tensor_waits_for_the_next_cycle() -> None:
    clock, done = Clock(), []
    ring = RingAllReduce(clock, uniform(2, 0, 100.0), Ring(cycle_s=5.0), [100], lambda *_: done.append(clock.now))
    clock.at(6.0, ring.gradient_ready, 0, 0)
    clock.run()
    assert done == pytest.approx([11.0])
