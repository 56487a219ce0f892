"""RD05, RD07, RD18 on recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import addressing
from bpsfast.tools.doctor.finding import Status
from tests.sysfs_trees.machine import Machine, commands

PORT = "sys/class/infiniband/mlx5_0/ports/1"


def _only(machine: Machine, device: str = "mlx5_0") -> Machine:
    """Leave one device."""
    other = {"mlx5_0": "mlx5_1", "mlx5_1": "mlx5_0"}[device]
    return machine.remove(f"sys/class/infiniband/{other}")


def _rows(machine: Machine, *rows: int) -> Machine:
    """Leave these rows of the GID table."""
    for row in range(4):
        if row not in rows:
            machine.write(f"{PORT}/gids/{row}", "0000:0000:0000:0000:0000:0000:0000:0000")
            machine.remove(f"{PORT}/gid_attrs/types/{row}")
    return machine


def test_the_routable_row_passes(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(addressing.gid)
    assert found.status is Status.PASS and "mlx5_0/1 GID 3 RoCE v2 10.1.0.7" in found.found


def test_infiniband_needs_none(recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine("infiniband").check(addressing.gid).status is Status.PASS
    assert recorded_machine("none").check(addressing.gid).status is Status.SKIP


def test_a_link_local_row_warns(recorded_machine: Callable[[str], Machine]) -> None:
    local = _rows(_only(recorded_machine("mlx5_roce")), 0, 1).check(addressing.gid)
    assert local.status is Status.WARN and "link-local" in local.found
    assert commands(local)["host"] == "sudo ip addr add A.B.C.D/24 dev eth2"


def test_a_table_of_v1_rows_fails(recorded_machine: Callable[[str], Machine]) -> None:
    old = _rows(_only(recorded_machine("mlx5_roce")), 0, 2).check(addressing.gid)
    assert old.status is Status.FAIL and "RoCE v1" in old.found


def test_an_empty_table_fails(recorded_machine: Callable[[str], Machine]) -> None:
    found = _rows(_only(recorded_machine("mlx5_roce"))).check(addressing.gid)
    assert found.status is Status.FAIL and "empty" in found.found and "eth2" in found.found


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_pinned_row_that_is_worse_fails_and_the_right_one_is_named(
        index: int, recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(addressing.gid, rdma_gid_index=index)
    assert found.status is Status.FAIL and commands(found)["job"].startswith("use index 3: BPSFAST_RDMA_GID_INDEX=3")


def test_a_pinned_row_that_is_empty_fails(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(addressing.gid, rdma_gid_index=5)
    assert found.status is Status.FAIL and "empty row" in found.found


def test_a_peer_of_another_version_or_kind_fails(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    assert machine.check(addressing.gid, "gpu08-roce").status is Status.PASS
    says = machine.answers["peer"]
    machine.answer(peer=says | {"used": [says["used"][0] | {"gid_version": "v1"}]})
    found = machine.check(addressing.gid, "gpu08-roce")
    assert found.status is Status.FAIL and "RoCE v1 10.1.0.8" in found.found
    assert commands(found)["job"] == "BPSFAST_RDMA_GID_INDEX=2 on this machine"
    machine.answer(peer=says | {"used": [says["used"][0] | {"gid": "fe80::1", "gid_version": "IB"}]})
    found = machine.check(addressing.gid, "gpu08-roce")
    assert found.status is Status.FAIL and "InfiniBand" in found.found


def test_the_route_by_the_card_passes(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(addressing.route, "gpu08-roce")
    assert found.status is Status.PASS and "eth2" in found.found


def test_the_route_by_another_card_warns_and_says_by_which(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(addressing.route, "gpu08")
    assert found.status is Status.WARN and "reached by eth0, but mlx5_0/1 is on eth2" in found.found
    named = recorded_machine("mlx5_roce").answer(names={"x": ["10.2.0.8"]})
    assert named.check(addressing.route, "x", rdma_devices="=mlx5_0").status is Status.WARN


def test_no_route_fails_and_no_peer_skips(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").answer(names={"far": ["192.0.2.1"]})
    found = machine.check(addressing.route, "far")
    assert found.status is Status.FAIL and commands(found)["check"] == "ip route get 192.0.2.1"
    assert machine.check(addressing.route).status is Status.SKIP


def test_a_card_without_an_address_warns_even_without_a_peer(recorded_machine: Callable[[str], Machine]) -> None:
    machine = _rows(_only(recorded_machine("mlx5_roce")), 0, 1).answer(addresses={"eth2": ["fe80::1/64"]})
    assert machine.check(addressing.route).status is Status.WARN


def test_this_machine_as_its_own_peer_is_told(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").answer(
        names={"me": ["10.1.0.7"]}, routes={"10.1.0.7": {"netdev": "lo", "source": "10.1.0.7", "local": True}})
    assert machine.check(addressing.route, "me").status is Status.INFO


def test_a_name_that_is_the_loopback_is_told(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(addressing.hostname)
    assert found.status is Status.INFO and "127.0.1.1" in commands(found)["host"]
    assert recorded_machine("infiniband").check(addressing.hostname).status is Status.PASS
    assert recorded_machine("rxe").check(addressing.hostname).status is Status.INFO


@pytest.mark.parametrize(("node_host", "status"), [
    ("10.1.0.7", Status.PASS), ("10.9.9.9", Status.FAIL), ("127.0.0.1", Status.FAIL), ("nobody", Status.FAIL)])
def test_an_address_to_tell_peers_must_be_this_machine_s(node_host: str, status: Status,
                                                         recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine("mlx5_roce").check(addressing.hostname, node_host=node_host).status is status
