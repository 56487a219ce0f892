"""A folded layout is as good as simulating every machine, where it may be used."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.simulator.network import Cluster, Costs, cluster, uniform
from bpsfast.tools.simulator.partition_layout import folded, full, is_symmetric
from bpsfast.tools.simulator.simulation import Options, simulate
from bpsfast.tools.simulator.workload import Layer, Workload, one_bulk, partitioned, workload

pytestmark = pytest.mark.matrix

RATE = 1e9


def training(compute_s: float) -> Workload:
    shapes = {f"w{i}": (4_000_000,) for i in range(10)}
    return workload("w", [Layer(w, compute_s / 30, compute_s / 15, (w,)) for w in shapes], shapes)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k", "policy"), [(2, 0, "colocated"), (4, 0, "colocated"), (8, 0, "optimal"),
                                                (4, 4, "ps"), (4, 4, "optimal"), (8, 8, "optimal"), (8, 4, "ps")])
@pytest.mark.parametrize(("compute_s", "cross_barrier"), [(0.05, False), (0.2, False), (0.8, False), (0.05, True)])
def test_folding_changes_the_step_by_less_than_three_percent(n: int, k: int, policy: str, compute_s: float,
                                                             cross_barrier: bool) -> None:
    # fine partitions: what the layout's module says of rows that are overtaken
    costs = Costs(2e-6, 1e-5, 2e10, True, 8e9, 8e9)
    options = Options(partition_nbytes=1 << 16, credit_nbytes=1 << 20, cross_barrier=cross_barrier)
    steps = [simulate(training(compute_s), uniform(n, k, RATE, costs), policy, options._replace(fold=fold)).step_s
             for fold in (False, True)]
    assert steps[1] == pytest.approx(steps[0], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("cross_barrier", [False, True])
def test_folding_leaves_out_what_coarse_partitions_cost(cross_barrier: bool) -> None:
    options = Options(partition_nbytes=1 << 18, credit_nbytes=1 << 20, cross_barrier=cross_barrier)
    steps = [simulate(training(0.2), uniform(8, 8, RATE), "optimal", options._replace(fold=fold)).step_s
             for fold in (False, True)]
    assert 0.85 * steps[0] < steps[1] <= 1.03 * steps[0]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 2), (8, 4)])
def test_folding_with_some_helpers_is_optimistic_and_not_done_unasked(n: int, k: int) -> None:
    options = Options(partition_nbytes=1 << 18, credit_nbytes=1 << 20)
    steps = [simulate(training(0.2), uniform(n, k, RATE), "optimal", options._replace(fold=fold)).step_s
             for fold in (False, True)]
    assert 0.8 * steps[0] < steps[1] < steps[0]
    assert not is_symmetric(uniform(n, k, RATE), "optimal")
    assert is_symmetric(uniform(n, n, RATE), "optimal") and is_symmetric(uniform(n, 0, RATE), "optimal")


def test_folding_moves_the_same_bytes() -> None:
    job = one_bulk(64_000_000, 4)
    wires = []
    for fold in (False, True):
        found = simulate(job, uniform(4, 2, RATE), "optimal", Options(partition_nbytes=1 << 16, fold=fold), 1)
        wires.append([found.wire_nbytes[0], found.wire_nbytes[-1]])
    for one, other in zip(*wires):
        assert one == pytest.approx(other, rel=0.02)


def test_every_partition_has_an_owner_and_its_place_in_the_order() -> None:
    plan = partitioned(training(1.0), 1 << 20)
    for layout in (full(uniform(3, 2, RATE), plan, "optimal"), folded(uniform(3, 2, RATE), plan, "optimal"),
                   full(uniform(3, 2, RATE), plan, "optimal", interleave=True)):
        assert all(0 <= part.owner < len(layout.machines) for part in layout.parts)
        assert [part.key for part in layout.parts] == list(range(len(layout.parts)))
        assert sorted(i for parts in layout.parts_of_unit for i in parts) == list(range(len(layout.parts)))
        assert all(part.first in layout.parts_of_unit[part.unit] for part in layout.parts)


@pytest.mark.parametrize(("machines", "policy", "words"), [
    (cluster([1.0, 2.0]), "optimal", "all alike"), (uniform(2, 0, 1.0), "ps", "has none"),
    (uniform(2, 1, 1.0), "hash:djb2", "cannot be folded")])
def test_what_cannot_be_folded_is_named(machines: Cluster, policy: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        folded(machines, partitioned(one_bulk(8192), 4096), policy)
