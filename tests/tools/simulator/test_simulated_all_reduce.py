"""All-reduces by urgency in the simulator: what one takes, in what order they begin, what credit is for."""
from __future__ import annotations

import pytest

from bpsfast.tools.simulator.all_reduce import Ring, ScheduledAllReduce, reduce_s
from bpsfast.tools.simulator.network import Clock, Cluster, Costs, uniform
from bpsfast.tools.simulator.simulation import Options, simulate
from bpsfast.tools.simulator.workload import Layer, Workload, one_bulk, partitioned, workload

PAGE = 4096
RING = Ring()


def two_tensors(front: int, back: int) -> Workload:
    """Return a workload of two layers with that many pages."""
    layers = [Layer("front", 1.0, 1.0, ("front",)), Layer("back", 1.0, 1.0, ("back",))]
    return workload("two", layers, {"front": (front * PAGE // 4,), "back": (back * PAGE // 4,)})


def ends_of(cluster: Cluster, job: Workload, *, credit: int, priority: bool = True,
            ring: Ring = RING) -> tuple[dict[int, float], float]:
    """Give gradients of the back layer at 0 s, of the front layer at 1.5 s; return when sums are there, wire bytes."""
    clock = Clock()
    ends: dict[int, float] = {}
    exchange = ScheduledAllReduce(clock, cluster, ring, partitioned(job, PAGE), credit_nbytes=credit * PAGE,
                                  priority=priority, done=lambda worker, unit: ends.__setitem__(unit, clock.now))
    clock.at(0.0, exchange.gradient_ready, 0, 1)
    clock.at(1.5, exchange.gradient_ready, 0, 0)
    clock.run()
    return ends, exchange.wire_nbytes


@pytest.mark.parametrize(("n", "factor", "front_s"), [(2, 1.0, 3.0), (4, 1.5, 3.0), (8, 1.75, 3.5)])
def test_a_partition_takes_its_share_of_a_ring_and_partitions_follow_each_other(n: int, factor: float,
                                                                                front_s: float) -> None:
    ends, wire_nbytes = ends_of(uniform(n, 0, PAGE), two_tensors(1, 3), credit=1)
    assert ends == {0: pytest.approx(front_s), 1: pytest.approx(factor * 4)}
    assert wire_nbytes == pytest.approx(factor * 4 * PAGE)


def test_what_is_urgent_overtakes_what_has_not_begun() -> None:
    cluster, job = uniform(2, 0, PAGE), two_tensors(2, 6)
    assert ends_of(cluster, job, credit=1) == ({0: 4.0, 1: 8.0}, 8 * PAGE)
    assert ends_of(cluster, job, credit=4)[0] == {0: 7.0, 1: 8.0}, "four more follow the one that is through"
    assert ends_of(cluster, job, credit=1, priority=False)[0] == {0: 8.0, 1: 6.0}


def test_credit_for_several_fills_the_ring_while_lock_steps_wait() -> None:
    """Two lock-steps and rank 0's word: three latencies after a partition has left the ring its sum is there."""
    cluster, job = uniform(2, 0, PAGE, Costs(latency_s=1.0)), two_tensors(1, 4)
    assert max(ends_of(cluster, job, credit=1)[0].values()) == 5 * (1 + 3)
    assert max(ends_of(cluster, job, credit=4)[0].values()) == 5 * 1 + 3
    lone = simulate(job, uniform(1, 0, PAGE, Costs(latency_s=1.0)), "all-reduce", Options(partition_nbytes=PAGE))
    assert lone.step_s == job.compute_s and lone.wire_nbytes == ((0.0, 0.0),)


def test_slices_and_members_cost_what_they_cost_a_ring() -> None:
    cluster, ring = uniform(4, 0, PAGE), Ring(ranks_per_machine=2, slice_nbytes=100, overhead_s=0.01)
    ends, _ = ends_of(cluster, two_tensors(1, 3), credit=1, ring=ring)
    assert max(ends.values()) == pytest.approx(4 * reduce_s(PAGE, cluster, ring))


def test_of_one_tensor_it_is_the_rings_time() -> None:
    job, cluster = one_bulk(1_000_000), uniform(4, 0, 1e6)
    assert simulate(job, cluster, "all-reduce", n_steps=1).step_s == pytest.approx(1.5)


def test_urgency_pays_where_the_barrier_is_crossed() -> None:
    job, cluster = two_tensors(4, 4), uniform(2, 0, PAGE)
    steps = {(priority, cross): simulate(job, cluster, "all-reduce", Options(
        priority=priority, cross_barrier=cross, partition_nbytes=PAGE, credit_nbytes=PAGE)).step_s
        for priority in (False, True) for cross in (False, True)}
    assert steps == {(False, False): 11, (False, True): 11, (True, False): 11, (True, True): 10}
