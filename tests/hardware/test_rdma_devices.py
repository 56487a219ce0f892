"""RDMA devices and their ports, read from recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.hardware.rdma_devices import can_talk, pkey_index, roce_mtu
from tests.sysfs_trees.machine import Machine


def test_a_roce_card(recorded_machine: Callable[[str], Machine]) -> None:
    first, second = recorded_machine("mlx5_roce").host.devices
    assert (first.name, first.kind, first.driver, first.firmware) == ("mlx5_0", "CA", "mlx5_core", "22.39.1002")
    assert (first.numa_node, second.numa_node, first.local_cpus) == (0, 1, "0-15,32-47")
    assert (first.uverbs, second.uverbs) == ("uverbs0", "uverbs1")
    assert first.pcie is not None and second.pcie is not None
    assert (first.pcie.address, first.pcie.degraded, second.pcie.degraded) == ("0000:3b:00.0", False, True)
    assert (second.pcie.speed, second.pcie.width, second.pcie.max_speed, second.pcie.max_width) == (8.0, 8, 16.0, 16)
    [port] = first.ports
    assert (port.state, port.phys_state, port.link_layer, port.rate_gbps) == ("ACTIVE", "LinkUp", "Ethernet", 100.0)
    assert port.is_active and port.is_roce and port.netdev == "eth2"


def test_an_infiniband_card(recorded_machine: Callable[[str], Machine]) -> None:
    (_, used), (_, idle) = recorded_machine("infiniband").host.ports
    assert (used.lid, used.sm_lid, used.rate_gbps, used.netdev) == (42, 1, 200.0, "ib0")
    assert used.is_active and not used.is_roce
    assert (idle.state, idle.phys_state, idle.netdev, idle.is_active) == ("DOWN", "Polling", "ib1", False)


def test_a_partition_key_is_found_in_the_ports_table(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband")
    folder = "sys/class/infiniband/mlx5_0/ports/1/pkeys"
    for index, key in enumerate(["0x7fff", "0x0000", "0x8001", "0x0002", "0x8002"]):
        machine.write(f"{folder}/{index}", f"{key}\n")
    table = machine.host.pkeys("mlx5_0", 1)
    assert table == {0: 0x7FFF, 2: 0x8001, 3: 0x0002, 4: 0x8002}
    for wanted, row in {0: 0, 0x8001: 2, 0x0001: 2, 0x0002: 3, 0x8002: 4, 0xFFFF: 0}.items():
        assert pkey_index(table, wanted) == row
    assert pkey_index(table, 0x8003) is None
    assert machine.host.pkeys("mlx5_9", 1) == {} and pkey_index({}, 0) == 0


@pytest.mark.parametrize(("ours", "theirs", "can"), [
    (0x8001, 0x8001, True), (0x8001, 0x0001, True), (0x0001, 0x0001, False), (0x8001, 0x8002, False),
    (0, 0x8002, True), (0x0001, 0, True)])
def test_ports_of_one_partition_talk_if_one_of_them_is_a_full_member(ours: int, theirs: int, can: bool) -> None:
    assert can_talk(ours, theirs) is can


def test_software_and_cloud_devices(recorded_machine: Callable[[str], Machine]) -> None:
    rxe = recorded_machine("rxe").host.devices[0]
    assert (rxe.driver, rxe.firmware, rxe.numa_node, rxe.pcie, rxe.ports[0].netdev) == ("rxe", "", None, None, "roce0")
    [efa] = recorded_machine("efa").host.devices
    assert (efa.driver, efa.kind, efa.pcie, efa.ports[0].netdev) == ("efa", "unspecified", None, None)
    assert recorded_machine("none").host.devices == []


def test_ten_devices_are_in_the_order_of_their_numbers(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("rxe")
    for number in (2, 10):
        machine.write(f"sys/class/infiniband/rxe{number}/node_desc", "rxe")
    assert [device.name for device in machine.host.devices] == ["rxe0", "rxe1", "rxe2", "rxe10"]
    assert machine.host.devices[2].ports == () and machine.host.devices[2].uverbs is None


def test_a_port_with_nothing_in_it_is_unknown_not_an_error(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("rxe")
    machine.remove("sys/class/infiniband/rxe0/ports/1")
    machine.write("sys/class/infiniband/rxe0/ports/1/other", "")
    port = machine.host.devices[0].ports[0]
    assert (port.state, port.link_layer, port.rate_gbps, port.lid) == ("unknown", "unknown", None, 0)


# the kernel's iboe_get_mtu: 96 bytes of headers at most beside the payload
@pytest.mark.parametrize(("mtu", "path"), [
    (9000, 4096), (4192, 4096), (4191, 2048), (4200, 4096), (2200, 2048), (1500, 1024), (1120, 1024), (1119, 512),
    (576, 256), (352, 256), (351, 0), (0, 0)])
def test_the_roce_mtu_is_the_power_of_two_that_fits(mtu: int, path: int) -> None:
    assert roce_mtu(mtu) == path
