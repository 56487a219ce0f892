"""The rate of the card behind an address: cards that tell it, what stands on them, and whoever does not know."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bpsfast.base.settings import Settings
from bpsfast.hardware.host import Host
from bpsfast.hardware.rdma_route import interface_gbps, rails_gbps
from tests.sysfs_trees.machine import Machine

NET = "sys/class/net"


def moved(machine: Machine, name: str) -> Machine:
    """Give the address 10.9.9.9 to interface *name*."""
    addresses = {netdev: [each for each in found if not each.startswith("10.9.9.9/")]
                 for netdev, found in machine.answers["addresses"].items()}
    return machine.answer(addresses=addresses | {name: ["10.9.9.9/24"]})


def stacked(machine: Machine, name: str, *lowers: str) -> Machine:
    """Add an interface without a driver that stands on *lowers*."""
    machine.write(f"{NET}/{name}/ifindex", "99").write(f"{NET}/{name}/speed", "10000")
    for lower in lowers:
        machine.write(f"{NET}/{name}/lower_{lower}/ifindex", "98")
    return moved(machine, name)


def test_a_card_tells_its_rate(recorded_machine: Callable[[str], Machine]) -> None:
    assert interface_gbps(recorded_machine("mlx5_roce").host, "10.2.0.7") == (100.0, "eth3 tells it")


def test_an_address_of_nobody_and_loopback_have_none(recorded_machine: Callable[[str], Machine]) -> None:
    assert interface_gbps(recorded_machine("mlx5_roce").host, "10.99.99.99")[0] == 0.0
    assert interface_gbps(Host(), "127.0.0.1") == (0.0, "lo is no card")


def test_a_vlan_and_a_bridge_are_as_fast_as_the_one_card_below(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    assert interface_gbps(stacked(machine, "eth3.100", "eth3").host, "10.9.9.9") == (100.0, "eth3 tells it")
    machine.write(f"{NET}/tap0/ifindex", "97").write(f"{NET}/tap0/speed", "10")
    assert interface_gbps(stacked(machine, "br0", "eth3", "tap0").host, "10.9.9.9")[0] == 100.0
    assert interface_gbps(stacked(machine, "br1", "eth2", "eth3").host, "10.9.9.9") == (0.0, "br1 stands on 2 cards")
    assert interface_gbps(stacked(machine, "loop0", "loop0").host, "10.9.9.9")[0] == 0.0


def test_a_bond_tells_its_own(recorded_machine: Callable[[str], Machine]) -> None:
    machine = stacked(recorded_machine("mlx5_roce"), "bond0", "eth2", "eth3")
    machine.write(f"{NET}/bond0/bonding/mode", "802.3ad 4").write(f"{NET}/bond0/speed", "200000")
    assert interface_gbps(machine.host, "10.9.9.9") == (200.0, "bond0 tells it")


def test_what_is_virtual_or_not_plugged_in_is_not_known(recorded_machine: Callable[[str], Machine]) -> None:
    assert interface_gbps(stacked(recorded_machine("mlx5_roce"), "veth0").host, "10.9.9.9") == (0.0, "veth0 is no card")
    unplugged = recorded_machine("mlx5_roce").write(f"{NET}/eth3/speed", "-1")
    assert interface_gbps(unplugged.host, "10.2.0.7") == (0.0, "eth3 tells no speed")


@pytest.mark.parametrize("driver", ["virtio_net", "vmxnet3", "hv_netvsc"])
def test_a_card_that_a_hypervisor_plays_is_not_believed(driver: str,
                                                        recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    link: Path = machine.root / NET / "eth3/device/driver"
    link.unlink()
    link.symlink_to(f"../../bus/drivers/{driver}")
    assert interface_gbps(machine.host, "10.2.0.7") == (0.0, f"eth3 is a virtual card ({driver})")


def test_rdma_ports_tell_theirs_also_where_another_card_has_the_address(
        recorded_machine: Callable[[str], Machine]) -> None:
    host = recorded_machine("mlx5_roce").host
    assert rails_gbps(host, "10.0.0.7") == (200.0, "mlx5_0/1, mlx5_1/1 by RDMA")
    assert rails_gbps(host, "10.0.0.7", Settings(rdma_devices="mlx5_1")) == (100.0, "mlx5_1/1 by RDMA")
    assert rails_gbps(recorded_machine("infiniband").host, "172.16.0.42") == (200.0, "mlx5_0/1 by RDMA")


def test_rdma_in_software_none_and_misnamed_tell_nothing(recorded_machine: Callable[[str], Machine]) -> None:
    assert rails_gbps(recorded_machine("rxe").host, "10.9.0.1") == (0.0, "rxe0/1, rxe1/1: no card whose rate is known")
    assert rails_gbps(recorded_machine("efa").host, "172.31.5.20") == (0.0, "there is no RDMA port to use")
    gbps, why = rails_gbps(recorded_machine("mlx5_roce").host, "10.0.0.7", Settings(rdma_devices="mlx4_0"))
    assert gbps == 0.0 and "mlx4_0" in why
