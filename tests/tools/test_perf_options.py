"""What is measured for which settings: as much on the way as a job has, in messages as large as its partitions."""
from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bpsfast.base.settings import Settings
from bpsfast.orchestration.errors import ConfigError, UnsupportedError
from bpsfast.tools.perf import perf_plan as plans
from bpsfast.tools.tune.tunables import INCAST, LATENCY, NAMES, ONE_WAY, TWO_WAY, plan_of, rails_of
from tests.tools.test_tunables import rail, side

START = {name: getattr(Settings(), name) for name in NAMES}
ONE = [rail(), rail()], 1


def test_the_defaults_have_four_partitions_on_the_way():
    plan = plan_of(START, TWO_WAY, *ONE, 0.3, 30.0)
    assert (plan.sizes, plan.depth, plan.pairs, plan.mtu) == ((4_096_000,), 4, 1, 4096)
    assert plan.both_ways and not plan.reversed and plan.duration_s == 0.3
    assert plan_of(START, INCAST, *ONE, 0.3, 30.0).reversed and not plan_of(START, ONE_WAY, *ONE, 0.3, 30.0).both_ways


def test_queue_pairs_beyond_what_is_on_the_way_stay_idle():
    plan = plan_of(START | {"rdma_queue_pairs": 8}, ONE_WAY, *ONE, 0.3, 30.0)
    assert (plan.pairs, plan.depth) == (4, 1)
    plan = plan_of(START | {"rdma_queue_pairs": 8}, ONE_WAY, ONE[0], 2, 0.3, 30.0)
    assert (plan.pairs, plan.depth) == (2, 1)


def test_a_latency_is_that_of_small_writes():
    plan = plan_of(START | {"rdma_inline_bytes": 256}, LATENCY, *ONE, 0.3, 30.0)
    assert plan.verb == "lat" and plan.sizes == (64,) and plan.inline_nbytes == 256


def test_the_mtu_is_at_most_the_narrowest_port_s():
    ways = [rail(mtu=4096), rail(mtu=2048)]
    found = {mtu: plan_of(START | {"rdma_mtu": mtu}, ONE_WAY, ways, 1, 1, 1).mtu for mtu in (0, 1024, 4096)}
    assert found == {0: 2048, 1024: 1024, 4096: 2048}


@given(st.fixed_dictionaries({
    "partition_bytes": st.integers(4096, 1 << 24), "credit_bytes": st.integers(4096, 1 << 28),
    "rdma_queue_pairs": st.integers(1, 64), "rdma_queue_depth": st.integers(1, 16384),
    "rdma_signal_every": st.integers(1, 1024), "rdma_mtu": st.sampled_from([0, 256, 1024, 4096]),
}), st.sampled_from([ONE_WAY, TWO_WAY, INCAST, LATENCY]), st.integers(1, 4))
def test_every_plan_is_one_that_perf_accepts(config, load, n_ways):
    plan = plan_of(START | config, load, ONE[0], n_ways, 0.3, 30.0)
    plans.check(plan)
    if load != LATENCY:
        on_the_way = plan.depth * plan.pairs * n_ways
        assert on_the_way * config["partition_bytes"] <= max(config["credit_bytes"], n_ways * config["partition_bytes"])


def test_rails_are_those_in_use_or_those_named():
    both = side("a", rail("mlx5_0"), rail("mlx5_1"))
    assert [each.device for each in rails_of(both, "")] == ["mlx5_0"]
    assert [each.device for each in rails_of(both, "=mlx5_0:1,mlx5_1:1")] == ["mlx5_0", "mlx5_1"]
    with pytest.raises(ConfigError, match="rdma_devices='=mlx5_9' names no usable port of a"):
        rails_of(both, "=mlx5_9")
    with pytest.raises(UnsupportedError, match="a: no RDMA port can be used: there is no RDMA device"):
        rails_of(side("a"), "")
