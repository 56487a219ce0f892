"""RD11 on recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import hardware
from bpsfast.tools.doctor.finding import Status
from tests.sysfs_trees.machine import Machine, commands

FIRST = "sys/devices/pci0000:3a/0000:3a:02.0/0000:3b:00.0"


def test_a_narrow_slot_warns_with_the_rate_that_is_left(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(hardware.place)
    assert found.status is Status.WARN
    assert found.found == "mlx5_1 runs at x8 of x16, 8 of 16 GT/s: at most about 55 Gb/s, the port has 100"
    assert commands(found)["check"].startswith("sudo lspci -vv -s 0000:b0:00.0")


def test_a_narrow_slot_that_suffices_passes(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").write("sys/class/infiniband/mlx5_1/ports/1/rate", "25 Gb/sec (1X EDR)")
    assert machine.check(hardware.place).status is Status.PASS


def test_a_card_at_the_other_socket_warns_and_the_command_pins(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").write("proc/self/status", "Cpus_allowed_list:\t32-63")
    found = machine.check(hardware.place)
    assert found.status is Status.WARN and "mlx5_0 is on NUMA node 0, this process runs on node 1" in found.found
    assert commands(found)["job"].startswith("numactl --cpunodebind=0")
    assert recorded_machine("infiniband").check(hardware.place).status is Status.PASS


def test_a_card_at_a_node_where_nobody_can_run_is_no_fault(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").write("proc/self/status", "Cpus_allowed_list:\t32-63")
    machine.write("sys/devices/system/node/node0/cpulist", "")
    assert machine.check(hardware.place).status is Status.PASS
    machine.remove("sys/devices/system/node")
    assert machine.check(hardware.place).status is Status.PASS, "a container that shows no nodes"


def test_a_translating_iommu_is_named_beside_it(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").write("sys/kernel/iommu_groups/0/type", "DMA")
    assert "iommu=pt" in commands(machine.check(hardware.place))["kernel"]
    machine.write("proc/cmdline", "root=/dev/sda2 iommu=pt")
    assert "kernel" not in commands(machine.check(hardware.place))


@pytest.mark.parametrize("name", ["rxe", "none"])
def test_what_is_no_card_is_skipped(name: str, recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine(name).check(hardware.place).status is Status.SKIP


def test_a_link_of_unknown_width_is_no_fault(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").write("sys/devices/pci0000:af/0000:af:02.0/0000:b0:00.0/current_link_width",
                                                  "0")
    assert machine.check(hardware.place).status is Status.PASS
