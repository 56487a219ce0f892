"""Which port and GID lead to a peer, and why not the others."""
from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable

import pytest

from bpsfast.base.settings import Settings
from bpsfast.hardware.rdma_route import RailChoice, choose, incapable, peer_address
from bpsfast.orchestration.errors import ConfigError, UnsupportedError
from tests.sysfs_trees.machine import Machine


def chosen(machine: Machine, peer: str = "", **values: object) -> RailChoice:
    settings = Settings(**{f"rdma_{name}": value for name, value in values.items()})  # type: ignore[arg-type]
    return choose(machine.host, settings, ipaddress.ip_address(peer) if peer else None)


def names(choice: RailChoice) -> tuple[list[str], list[str], list[str]]:
    return [rail.name for rail in choice.rails], [rail.name for rail in choice.spare], list(choice.rejected)


def test_all_ports_are_used_and_without_a_peer_the_near_card_comes_first(
        recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    choice = chosen(machine)
    assert names(choice) == (["mlx5_0/1", "mlx5_1/1"], [], [])
    assert [(rail.position, rail.network, rail.gbps) for rail in choice.rails] == [
        (0, "10.1.0.0/24", 100.0), (1, "10.2.0.0/24", 100.0)]
    assert choice.rails[0].gid is not None and choice.rails[0].gid.index == 3
    assert "NUMA node 0, this process's" in choice.rails[0].reason
    machine.write("proc/self/status", "Cpus_allowed_list:\t16-31")
    assert names(chosen(machine))[0] == ["mlx5_1/1", "mlx5_0/1"]


def test_a_port_whose_address_passes_no_router_is_spare_beside_one_whose_does(
        recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    for row in (2, 3):
        machine.write(f"sys/class/infiniband/mlx5_0/ports/1/gids/{row}", "0000:0000:0000:0000:0000:0000:0000:0000")
    assert names(chosen(machine)) == (["mlx5_1/1"], ["mlx5_0/1"], [])
    for row in (2, 3):
        machine.write(f"sys/class/infiniband/mlx5_1/ports/1/gids/{row}", "0000:0000:0000:0000:0000:0000:0000:0000")
    assert names(chosen(machine)) == (["mlx5_0/1", "mlx5_1/1"], [], []), "none has a better one"


@pytest.mark.parametrize(("peer", "rail", "gid"), [("10.1.0.8", "mlx5_0/1", "10.1.0.7"),
                                                   ("10.2.0.8", "mlx5_1/1", "10.2.0.7")])
def test_the_route_decides(peer: str, rail: str, gid: str, recorded_machine: Callable[[str], Machine]) -> None:
    found, other = chosen(recorded_machine("mlx5_roce"), peer).rails
    assert f"leaves by {found.netdev}, not by it" in other.reason
    assert found.name == rail and found.gid is not None and str(found.gid.address) == gid
    assert f"is on the route to {peer}" in found.reason


@pytest.mark.parametrize(("tree", "link_layer"), [("mlx5_roce", "Ethernet"), ("infiniband", "InfiniBand")])
def test_a_path_goes_by_gid_on_ethernet_only(
        tree: str, link_layer: str, recorded_machine: Callable[[str], Machine]) -> None:
    rail = chosen(recorded_machine(tree)).rails[0]
    assert rail.gid is not None  # InfiniBand ports have tables of them, too

    def by_gid(peer: bytes) -> dict[str, object]:
        return {"gid": peer, "gid_index": rail.gid.index} if link_layer == "Ethernet" else {}

    peer = rail.gid.value[:8] + b"\1" * 8
    assert rail.path(link_layer, 7, peer) == {"lid": 7} | by_gid(peer)
    with_grh = dataclasses.replace(rail, grh=True)
    assert with_grh.path(link_layer, 7, peer) == {"lid": 7, "gid": peer, "gid_index": rail.gid.index}


def test_ports_of_different_infiniband_subnets_have_no_path(recorded_machine: Callable[[str], Machine]) -> None:
    rail = chosen(recorded_machine("infiniband")).rails[0]
    assert rail.gid is not None
    other = bytes.fromhex("fec0000000000001") + rail.gid.value[8:]
    ours = rail.gid.value[:8].hex(":", 2)
    for grh in (False, True):
        with pytest.raises(UnsupportedError, match=rf"{rail.name} is in the InfiniBand subnet {ours}, the peer's port "
                                                   r"in fec0:0000:0000:0001: .*, or use tcp"):
            dataclasses.replace(rail, grh=grh).path("InfiniBand", 7, other)
    assert rail.path("InfiniBand", 7, b"") == {"lid": 7}  # a port without a table: nothing is known


def test_ports_of_different_partitions_have_no_path(recorded_machine: Callable[[str], Machine]) -> None:
    rail = dataclasses.replace(chosen(recorded_machine("infiniband")).rails[0], pkey=0x0001)
    assert rail.gid is not None
    for pkey in (0x8001, 0):
        assert rail.path("InfiniBand", 7, rail.gid.value, pkey) == {"lid": 7}
    for pkey, shown in {0x0001: "0x0001", 0x8002: "0x8002"}.items():
        words = f"{rail.name} has the partition key 0x0001, the peer's port {shown}: .*BPSFAST_RDMA_PKEY"
        with pytest.raises(UnsupportedError, match=words):
            rail.path("InfiniBand", 7, rail.gid.value, pkey)


def test_a_global_route_header_needs_both_gids(recorded_machine: Callable[[str], Machine]) -> None:
    rail = chosen(recorded_machine("infiniband"), grh=True).rails[0]
    with pytest.raises(UnsupportedError, match="BPSFAST_RDMA_GRH is on, and the peer has no GID"):
        rail.path("InfiniBand", 7, b"")
    bare = dataclasses.replace(rail, gid=None)
    assert dataclasses.replace(bare, grh=False).path("InfiniBand", 7, b"") == {"lid": 7}
    with pytest.raises(UnsupportedError, match=f"BPSFAST_RDMA_GRH is on, and {rail.name} has no GID"):
        bare.path("InfiniBand", 7, b"\1" * 16)


def test_only_ports_of_the_wanted_partition_are_used(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    for device, keys in {"mlx5_0": ["0xffff", "0x8005"], "mlx5_1": ["0xffff"]}.items():
        for row, key in enumerate(keys):
            machine.write(f"sys/class/infiniband/{device}/ports/1/pkeys/{row}", f"{key}\n")
    assert [(rail.pkey, rail.pkey_index) for rail in chosen(machine).rails] == [(0xFFFF, 0), (0xFFFF, 0)]
    choice = chosen(machine, pkey=0x0005)  # the port is a full member, which is more than was asked for
    assert [(rail.name, rail.pkey, rail.pkey_index) for rail in choice.rails] == [("mlx5_0/1", 0x8005, 1)]
    assert choice.rejected["mlx5_1/1"] == "not in the partition 0x0005 (BPSFAST_RDMA_PKEY): its table has 0xffff"
    with pytest.raises(ConfigError, match=r"mlx5_1/1 is not in the partition 0x8005 \(BPSFAST_RDMA_PKEY\): its table "
                                          r"has 0xffff\. The subnet manager"):
        chosen(machine, pkey=0x8005, devices="mlx5_0,mlx5_1")


def test_a_route_by_no_card_is_told_in_the_reason(recorded_machine: Callable[[str], Machine]) -> None:
    found, _ = chosen(recorded_machine("mlx5_roce"), "10.0.0.8").rails
    assert "the route to 10.0.0.8 leaves by eth0, not by it" in found.reason


def test_a_bond_or_vlan_is_one_wire_with_its_card(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").answer(routes={"10.5.0.8": {"netdev": "bond0", "source": "10.5.0.7"}})
    machine.write("sys/class/net/bond0/ifindex", "9").write("sys/class/net/bond0/lower_eth3/ifindex", "5")
    found, _ = chosen(machine, "10.5.0.8").rails
    assert found.name == "mlx5_1/1" and "eth3 is on the route" in found.reason


def test_devices_that_are_named_are_all_used_in_the_order_of_their_numbers(
        recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    choice = chosen(machine, "10.2.0.8", devices="mlx5_1,mlx5_0")
    assert names(choice) == (["mlx5_0/1", "mlx5_1/1"], [], []) and "named by rdma_devices" in choice.rails[0].reason
    choice = chosen(machine, devices="^mlx5_0")
    assert names(choice) == (["mlx5_1/1"], [], ["mlx5_0/1"])
    assert choice.rejected["mlx5_0/1"] == "rdma_devices=^mlx5_0 leaves it out"


@pytest.mark.parametrize("devices", ["", "mlx5_1,mlx5_0"])
def test_a_port_that_is_down_keeps_its_position(devices: str, recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    both = chosen(machine, devices=devices).rails
    assert [(rail.name, rail.position) for rail in both] == [("mlx5_0/1", 0), ("mlx5_1/1", 1)]
    machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    [left] = chosen(machine, devices=devices).rails
    assert (left.name, left.position) == ("mlx5_1/1", 1)


def test_a_device_that_does_not_exist_is_an_error_with_those_that_do(
        recorded_machine: Callable[[str], Machine]) -> None:
    with pytest.raises(ConfigError, match=r"mlx5_9 matches nothing here; there is mlx5_0:1, mlx5_1:1"):
        chosen(recorded_machine("mlx5_roce"), devices="mlx5_9")
    with pytest.raises(ConfigError, match="there is no RDMA device"):
        chosen(recorded_machine("none"), devices="mlx5_0")


def test_a_row_can_be_pinned_and_an_empty_one_is_an_error(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    found, _ = chosen(machine, gid_index=1).rails
    assert found.gid is not None and found.gid.index == 1 and "link-local" in found.reason
    with pytest.raises(ConfigError, match=r"rdma_gid_index=4 is an empty row .*3 \(v2 10\.1\.0\.7\)"):
        chosen(machine, gid_index=4)


def test_each_port_that_is_not_usable_has_its_reason(recorded_machine: Callable[[str], Machine]) -> None:
    assert chosen(recorded_machine("infiniband")).rejected == {"mlx5_1/1": "the port is DOWN (Polling), not ACTIVE"}
    machine = recorded_machine("infiniband").write("sys/class/infiniband/mlx5_0/ports/1/lid", "0x0")
    assert "no subnet manager" in chosen(machine).rejected["mlx5_0/1"]
    machine = recorded_machine("rxe")
    for row in (0, 1):
        machine.remove(f"sys/class/infiniband/rxe0/ports/1/gids/{row}")
    assert chosen(machine).rejected == {"rxe0/1": "its GID table is empty (is roce0 up?)"}
    machine = recorded_machine("rxe").write("sys/class/infiniband/rxe0/node_type", "4: RNIC")
    assert "iWARP" in chosen(machine).rejected["rxe0/1"]


def test_a_choice_without_rails_says_why_of_every_port(recorded_machine: Callable[[str], Machine]) -> None:
    with pytest.raises(UnsupportedError, match=r"rdmap16s27/1: EFA has datagrams.*bpsfast doctor"):
        chosen(recorded_machine("efa")).require()
    with pytest.raises(UnsupportedError, match="there is no RDMA device"):
        chosen(recorded_machine("none")).require()
    assert chosen(recorded_machine("rxe")).require()[0].name == "rxe0/1"


def test_devices_that_can_never_be_used(recorded_machine: Callable[[str], Machine]) -> None:
    assert [incapable(device) for device in recorded_machine("rxe").host.devices] == [None, None]
    assert "EFA" in (incapable(recorded_machine("efa").host.devices[0]) or "")


def test_a_peer_s_address_may_be_a_name(recorded_machine: Callable[[str], Machine]) -> None:
    host = recorded_machine("mlx5_roce").host
    assert str(peer_address(host, "gpu08")) == "10.0.0.8" and str(peer_address(host, "10.1.2.3")) == "10.1.2.3"
    with pytest.raises(OSError, match="'nobody' cannot be resolved"):
        peer_address(host, "nobody")


def test_a_peer_on_this_machine_is_reached_by_the_interface_that_holds_its_address(
        recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").answer(
        routes={"10.2.0.7": {"netdev": "lo", "source": "10.2.0.7", "local": True}})
    choice = chosen(machine, "10.2.0.7")
    assert choice.route is not None and choice.route.local and choice.route.netdev == "eth3"
    assert choice.rails[0].name == "mlx5_1/1"
