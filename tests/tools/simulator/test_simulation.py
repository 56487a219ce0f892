"""Limits that a simulation must meet exactly, the optimum it must converge to, and an oracle that shares no code."""
from __future__ import annotations

import itertools
import time

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.placement.assignment import assign
from bpsfast.tools.simulator.network import Costs, cluster, uniform
from bpsfast.tools.simulator.simulation import Options, simulate
from bpsfast.tools.simulator.workload import Layer, Workload, one_bulk, partitioned, workload

pytestmark = pytest.mark.matrix

RATE = 1e9
#: Placement, order and window that let the bulk reach the optimum.
BEST = Options(interleave=True, partition_nbytes=32_768, credit_nbytes=131_072)


def chain(n_layers: int, nbytes: int, compute_s: float) -> Workload:
    """Return a chain of equal layers."""
    shapes = {f"w{i}": (nbytes // 4,) for i in range(n_layers)}
    each = compute_s / n_layers
    return workload("chain", [Layer(name, each / 3, each * 2 / 3, (name,)) for name in shapes], shapes)


def closed_form(n: int, k: int) -> float:
    """Return t* B / M of equal machines."""
    return max(1.0, 2 * n * (n - 1) / (n * n + k * n - 2 * k))


def test_one_partition_over_idle_links_takes_its_bytes_and_an_overhead_each_way() -> None:
    nbytes = 1_000_000
    job = one_bulk(nbytes)
    costs = Costs(overhead_s=1e-5, latency_s=1e-4)
    found = simulate(job, uniform(1, 1, RATE, costs), "ps", n_steps=1)
    assert found.step_s == pytest.approx(2 * (nbytes / RATE + 1e-5 + 1e-4), rel=1e-12)


def test_a_slow_sender_or_receiver_sets_the_time_of_one_message() -> None:
    job = one_bulk(1_000_000)
    for worker, helper in ((RATE, RATE / 4), (RATE / 4, RATE)):
        found = simulate(job, cluster([worker], [helper]), "ps", n_steps=1)
        assert found.step_s == pytest.approx(2 * 1_000_000 / (RATE / 4), rel=1e-12)


def test_sums_and_stages_inside_a_machine_add_their_time_to_a_lone_partition() -> None:
    job = one_bulk(1_000_000)
    costs = Costs(sum_rate=2e9, reduce_rate=4e9, broadcast_rate=5e9)
    found = simulate(job, uniform(1, 1, RATE, costs), "ps", n_steps=1)
    assert found.step_s == pytest.approx(2e-3 + 1e6 / 2e9 + 1e6 / 4e9 + 1e6 / 5e9, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(n, k) for n in (2, 4, 8) for k in range(n + 1)])
def test_many_partitions_converge_to_the_closed_form(n: int, k: int) -> None:
    nbytes = 200_000_000
    found = simulate(one_bulk(nbytes), uniform(n, k, RATE), "optimal", BEST, n_steps=1)
    assert 1 - 1e-9 <= found.step_s * RATE / nbytes / closed_form(n, k) < 1.01


@pytest.mark.parametrize(("strategy", "n", "k", "formula"), [
    ("colocated", 4, 0, 1.5), ("ring", 4, 0, 1.5), ("ps", 4, 1, 4.0), ("ps", 4, 2, 2.0), ("ps", 4, 4, 1.0)])
def test_other_strategies_converge_to_theirs(strategy: str, n: int, k: int, formula: float) -> None:
    nbytes = 100_000_000
    options = Options(partition_nbytes=131_072)
    found = simulate(one_bulk(nbytes), uniform(n, k, RATE), strategy, options, n_steps=1)
    cycle_s = options.ring.cycle_s if strategy == "ring" else 0.0
    assert 1 - 1e-9 <= (found.step_s - cycle_s) * RATE / nbytes / formula < 1.012


@pytest.mark.parametrize("k", [0, 4])
def test_priority_shortens_a_step_that_waits_for_communication(k: int) -> None:
    job = chain(12, 4_000_000, 0.02)
    steps = [simulate(job, uniform(4, k, RATE), "optimal", Options(
        priority=priority, cross_barrier=True, credit_nbytes=1 << 20, partition_nbytes=1 << 18), n_steps=6).step_s
        for priority in (True, False)]
    assert steps[0] < 0.97 * steps[1]


@pytest.mark.parametrize(("n_layers", "nbytes", "compute_s", "k"), list(itertools.product(
    (3, 8), (400_000, 4_000_000), (0.001, 0.02, 0.2), (0, 2, 4))))
def test_priority_never_costs_more_than_one_partition_on_each_path(n_layers: int, nbytes: int, compute_s: float,
                                                                  k: int) -> None:
    partition = 1 << 17
    job = chain(n_layers, nbytes, compute_s)
    with_priority, without = (simulate(job, uniform(4, k, RATE), "ps" if k == 4 else "colocated", Options(
        priority=priority, cross_barrier=True, partition_nbytes=partition, credit_nbytes=4 * partition), n_steps=6
    ).step_s for priority in (True, False))
    assert with_priority <= without + 4 * partition / RATE


def test_crossing_the_barrier_never_lengthens_a_step() -> None:
    job = chain(8, 4_000_000, 0.02)
    crossing, barrier = (simulate(job, uniform(4, 4, RATE), "optimal", Options(cross_barrier=cross, credit_nbytes=(
        1 << 20), partition_nbytes=1 << 18)).step_s for cross in (True, False))
    assert job.compute_s <= crossing < barrier


def test_without_overlap_the_step_is_computing_plus_communication() -> None:
    job = chain(5, 1_000_000, 0.05)
    found = simulate(job, uniform(2, 0, RATE), "ring", Options(overlap=False)._replace(
        ring=Options().ring._replace(cycle_s=0.0)))
    assert found.step_s == pytest.approx(0.05 + 5_000_000 / RATE, rel=1e-9)


@pytest.mark.parametrize("strategy", ["optimal", "colocated", "ps", "hash:mixed", "hash:djb2"])
def test_bytes_are_neither_lost_nor_made(strategy: str) -> None:
    job = chain(4, 3_000_001, 0.01)
    n_steps, n = 3, 3
    machines = uniform(n, 2, RATE)
    found = simulate(job, machines, strategy, Options(partition_nbytes=1 << 18), n_steps)
    plan = partitioned(job, 1 << 18)
    parts = [part.nbytes for unit in plan.units for part in unit.parts]
    keys = [(unit.unit << 16) | i for unit in plan.units for i in range(len(unit.parts))]
    owners = assign(parts, machines.machines, strategy, keys=keys)
    moved = sum(2 * nbytes * (n - (owner < n)) for nbytes, owner in zip(parts, owners))
    assert sum(tx for tx, _ in found.wire_nbytes) == sum(rx for _, rx in found.wire_nbytes) == n_steps * moved
    assert found.summed_nbytes == n_steps * n * job.nbytes


def test_two_runs_are_equal_to_the_last_bit() -> None:
    runs = [simulate(chain(6, 2_000_000, 0.02), cluster([1e9, 7e8, 3e8], [5e8], Costs(1e-5, 1e-5)), "optimal")
            for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("rates", "n"), [
    ((1e9, 1e9), 2), ((1e9, 1e9, 1e9), 2), ((1e9, 4e8, 7e8), 3), ((1e9, 1e9, 2.5e8, 1e9, 5e8), 3)])
@pytest.mark.parametrize(("overhead_s", "latency_s"), [(0.0, 0.0), (2e-5, 1e-4)])
def test_simpy_finds_the_same(rates: tuple[float, ...], n: int, overhead_s: float, latency_s: float) -> None:
    oracle = pytest.importorskip("tests.support.simulated_by_simpy")
    job = one_bulk(10_000_000, 7)
    machines = cluster(rates[:n], rates[n:], Costs(overhead_s, latency_s))
    options = Options(priority=False, partition_nbytes=1 << 18, credit_nbytes=1 << 40)
    found = simulate(job, machines, "optimal", options, n_steps=1)
    plan = partitioned(job, 1 << 18)
    # gradients are made from the last layer's last tensor to the first
    parts = [part for unit in reversed(plan.units) for part in unit.parts]
    sizes = [part.nbytes for unit in plan.units for part in unit.parts]
    owner_of = dict(enumerate(assign(sizes, machines.machines, "optimal")))
    theirs = oracle.bulk_s([p.nbytes for p in parts], [owner_of[p.part] for p in parts], n, rates, overhead_s,
                           latency_s)
    # events of one moment have no order that both must share: at most one partition on each of two hops
    tie_s = 0.0 if len({*rates}) > 1 else 2 * (1 << 18) / min(rates)
    assert found.first_s == pytest.approx(theirs, rel=0.02, abs=tie_s)


@pytest.mark.slow
def test_4096_machines_take_seconds() -> None:
    began = time.monotonic()
    found = simulate(chain(24, 30_000_000, 0.5), uniform(4096, 4096, 1.1e10), "optimal")
    assert found.is_folded and 0 < found.efficiency <= 1
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("strategy", "options", "n_steps", "words"), [
    ("fastest", Options(), 1, "placement 'fastest' is unknown"),
    ("optimal", Options(), 0, "one step or more"),
    ("optimal", Options(credit_nbytes=-1), 1, "credit_nbytes must not be negative"),
    ("optimal", Options(partition_nbytes=1), 1, "partition_nbytes must be a page"),
    ("ps", Options(), 1, "no helper|has none|job has none"),
    ("hash:djb2", Options(fold=True), 1, "cannot be folded"),
    ("ring", Options(ring=Options().ring._replace(slice_nbytes=0)), 1, "slices must have one byte"),
])
def test_bad_input_is_named(strategy: str, options: Options, n_steps: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(one_bulk(4096), uniform(2, 0, RATE), strategy, options, n_steps)
