"""Sockets and what joins them."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.hardware.topology import discovery
from bpsfast.hardware.topology.discovery import Cpu, Sockets
from tests.sysfs_trees.machine import Machine

Machines = Callable[[str], Machine]


def test_the_processors_kind_is_read(recorded_machine: Machines) -> None:
    machine = recorded_machine("dgx1")
    assert discovery.cpu(machine.host.tree) == Cpu("GenuineIntel", 6, 79, "Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz")
    machine.write("proc/cpuinfo", "processor\t: 0\ncpu\t\t: POWER9\nmodel\t\t: 8335-GTH")
    assert discovery.cpu(machine.host.tree) == Cpu()
    assert discovery.cpu(machine.remove("proc/cpuinfo").host.tree) == Cpu()


@pytest.mark.parametrize(("kind", "rate_bytes"), [
    (Cpu("GenuineIntel", 6, 79), 38.4e9), (Cpu("GenuineIntel", 6, 143), 96e9), (Cpu("AuthenticAMD", 25, 1), 108e9),
    (Cpu("AuthenticAMD", 23, 49), 108e9), (Cpu("GenuineIntel", 6, 0), 20.8e9), (Cpu("AuthenticAMD", 6, 79), 20.8e9),
    (Cpu(), 20.8e9)])
def test_rates_by_model(kind: Cpu, rate_bytes: float) -> None:
    assert discovery.between_rate_bytes(kind) == rate_bytes


def test_every_pair_of_sockets_is_joined_and_nodes_of_one_processor_faster(recorded_machine: Machines) -> None:
    machine = recorded_machine("dgx1")
    for number, cpus in enumerate(["0-9", "10-19", "20-29", "30-39"]):
        machine.write(f"sys/devices/system/node/node{number}/cpulist", cpus)
        machine.write(f"sys/devices/system/cpu/cpu{10 * number}/topology/physical_package_id", str(number // 2))
    found = {(link.a, link.b): link.rate_bytes for link in Sockets(machine.host).links}
    assert len(found) == 6 and found["socket0", "socket1"] == found["socket2", "socket3"] == 100e9
    assert found["socket0", "socket2"] == found["socket1", "socket3"] == 38.4e9


def test_nodes_of_unknown_processors_are_not_of_one(recorded_machine: Machines) -> None:
    machine = recorded_machine("dgx1")
    for number in (0, 1):
        cpu = min(machine.host.numa[number].cpus)
        machine.write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", "-1")
    assert [link.rate_bytes for link in Sockets(machine.host).links] == [38.4e9]


def test_devices_belong_to_their_node_or_the_nearest_with_cores(recorded_machine: Machines) -> None:
    machine = recorded_machine("dgx1")
    machine.write("sys/devices/system/node/node2/cpulist", "")
    machine.write("sys/devices/system/node/node0/distance", "10 21 28")
    machine.write("sys/devices/system/node/node1/distance", "21 10 14")
    found = Sockets(machine.host)
    assert [part.name for part in found.parts] == ["socket0", "socket1"]
    assert [found.of(node) for node in (0, 1, 2, 7, -1, None)] == [
        "socket0", "socket1", "socket1", "socket0", "socket0", "socket0"]


def test_the_nearest_node_is_found_where_numbers_are_missing(recorded_machine: Machines) -> None:
    machine = recorded_machine("dgx1").remove("sys/devices/system/node/node1")
    for number, cpus, distance in ((0, "0-19", "10 40 80 40"), (8, "20-39", "40 10 40 80"), (254, "", "80 40 10 80"),
                                   (255, "", "40 80 80 10")):
        machine.write(f"sys/devices/system/node/node{number}/cpulist", cpus)
        machine.write(f"sys/devices/system/node/node{number}/distance", distance)
    found = Sockets(machine.host)
    assert [found.of(node) for node in (0, 8, 254, 255)] == ["socket0", "socket8", "socket8", "socket0"]


def test_a_kernel_without_nodes_is_one_socket_with_all_cores(recorded_machine: Machines) -> None:
    machine = recorded_machine("dgx1").remove("sys/devices/system/node")
    machine.write("sys/devices/system/cpu/online", "0-79")
    found = Sockets(machine.host)
    assert [part.cpus for part in found.parts] == ["0-79"] and found.links == [] and found.of(1) == "socket0"
