"""Which settings are tried between machines of which kind, and the reason for each that is not."""
from __future__ import annotations

import msgspec

from bpsfast.base.settings import Settings
from bpsfast.tools.tune import tunables
from bpsfast.tools.tune.tunables import LATENCY, NAMES, TWO_WAY, HostCapabilities, RailCapabilities

START = {name: getattr(Settings(), name) for name in NAMES}


def rail(device="mlx5_0", **changes):
    fields = {"device": device, "port": 1, "driver": "mlx5_core", "link_layer": "Ethernet", "reason": "", "mtu": 4096,
              "max_qp": 1000, "max_qp_wr": 32768, "numa_node": 1, "near": (8, 9, 10, 11)}
    return RailCapabilities(**fields | changes)


def side(host, *rails, **changes):
    fields = {"host": host, "rails": rails, "rejected": {}, "n_used": 1, "n_numa": 2, "cores": tuple(range(16)),
              "huge_page_nbytes": 1 << 30}
    return HostCapabilities(**fields | changes)


def values(choice):
    return {tunable.name: tunable.values for tunable in choice.tunables}


def test_a_machine_with_everything_has_everything_but_what_the_switches_decide():
    both = (rail("mlx5_0"), rail("mlx5_1"))
    choice = tunables.choose(START, side("a", *both), [side("b", *both)], TWO_WAY)
    assert set(choice.untried) == {"rdma_traffic_class", "rdma_service_level"}
    assert "--traffic-class" in choice.untried["rdma_traffic_class"]
    found = values(choice)
    assert set(found) | set(choice.untried) == set(NAMES)
    assert found["rdma_devices"] == ("=mlx5_0:1", "=mlx5_1:1", "=mlx5_0:1,mlx5_1:1")
    assert found["rdma_cores"] == ("numa", "11") and found["rdma_mtu"] == (2048, 1024)
    assert found["rdma_relaxed_ordering"] == (True,) and found["huge_pages"] == ("off",)
    assert all(START[name] not in tried for name, tried in found.items())
    assert {tunable.name for tunable in choice.tunables if tunable.load == LATENCY} == {"rdma_inline_bytes"}


def test_what_the_user_names_is_tried():
    machines = side("a", rail()), [side("b", rail())]
    found = values(tunables.choose(START, *machines, TWO_WAY, (0, 106), (3,)))
    assert found["rdma_traffic_class"] == (106,) and found["rdma_service_level"] == (3,)
    choice = tunables.choose(START, *machines, TWO_WAY, only=("rdma_mtu",))
    assert set(values(choice)) == {"rdma_mtu"}
    assert choice.untried["credit_bytes"] == "--only does not name it"


def test_a_small_machine_is_told_what_it_lacks():
    poor = rail("rxe0", driver="rxe", mtu=1024, max_qp=1, max_qp_wr=64, numa_node=None, near=(0,))
    own = side("a", poor, n_numa=1, cores=(0,), huge_page_nbytes=0)
    choice = tunables.choose(START, own, [msgspec.structs.replace(own, host="b")], TWO_WAY)
    assert choice.untried["rdma_devices"] == "a has one usable port, rxe0:1"
    assert choice.untried["rdma_mtu"] == "the active MTU is 1024: smaller packets only cost time"
    assert choice.untried["rdma_relaxed_ordering"] == "the driver rxe ignores it"
    assert choice.untried["huge_pages"].startswith("no pool of 2 MiB pages on a, b: sysctl vm.nr_hugepages")
    assert "one NUMA node" in choice.untried["rdma_cores"]
    assert choice.untried["rdma_queue_pairs"] == "a port has max_qp=1"
    assert values(choice)["rdma_queue_depth"] == (8, 32)


def test_rails_that_have_other_names_elsewhere_cannot_stand_in_one_profile():
    both = (rail("mlx5_0"), rail("mlx5_1"))
    choice = tunables.choose(START, side("a", *both), [side("b", rail("mlx5_0"), rail("mlx5_7"))], TWO_WAY)
    assert choice.untried["rdma_devices"] == ("a has mlx5_0:1, mlx5_1:1 and b mlx5_0:1, mlx5_7:1: one profile cannot "
                                              "name both")


def test_infiniband_has_no_traffic_class():
    fabric = rail(link_layer="InfiniBand")
    choice = tunables.choose(START, side("a", fabric), [side("b", fabric)], TWO_WAY)
    assert "service levels" in choice.untried["rdma_traffic_class"]
