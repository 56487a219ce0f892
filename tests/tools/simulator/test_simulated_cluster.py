"""Clusters of a simulation: bad numbers are named."""
from __future__ import annotations

import math

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.simulator.network import MAX_MACHINES, Costs, cluster, uniform


def test_counts_and_uniformity() -> None:
    assert (uniform(3, 2, 1.0).n_workers, uniform(3, 2, 1.0).n_helpers) == (3, 2)
    assert uniform(3, 2, 1.0).is_uniform and cluster([1, 1], [2, 2]).is_uniform and uniform(2, 0, 1.0).is_uniform
    assert not cluster([1, 2]).is_uniform and not cluster([1, 1], [1, 2]).is_uniform


@pytest.mark.parametrize(("rates", "helpers", "words"), [
    ([], [], "at least one machine with ranks"), ([0.0], [], "worker 0 has a NIC of 0.0"),
    ([1.0], [1.0, -1.0], "helper 1 has a NIC of -1.0"), ([math.inf], [], "finite"), ([math.nan], [], "above zero"),
    ([1.0] * (MAX_MACHINES + 1), [], "at most 65536"),
])
def test_bad_rates_are_named(rates: list[float], helpers: list[float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster(rates, helpers)


@pytest.mark.parametrize("costs", [
    Costs(overhead_s=-1), Costs(latency_s=math.nan), Costs(sum_rate=0), Costs(reduce_rate=-1), Costs(broadcast_rate=0)])
def test_bad_costs_are_named(costs: Costs) -> None:
    name = next(name for name in costs._fields if getattr(costs, name) != getattr(Costs(), name))
    with pytest.raises(ConfigError, match=name):
        uniform(1, 0, 1.0, costs)


@pytest.mark.parametrize(("n", "k"), [(0, 1), (1, -1), (10**9, 0)])
def test_absurd_counts_are_refused_before_anything_is_made(n: int, k: int) -> None:
    with pytest.raises(ConfigError):
        uniform(n, k, 1.0)
