"""RD08 on recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import addressing
from bpsfast.tools.doctor.finding import Status
from tests.sysfs_trees.machine import Machine, commands


def test_large_packets_pass(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("rxe").check(addressing.packet_size)
    assert found.status is Status.PASS and found.found.startswith("rxe0/1 path MTU 4096 (roce0 mtu 4200)")
    assert recorded_machine("infiniband").check(addressing.packet_size).status is Status.PASS
    assert recorded_machine("none").check(addressing.packet_size).status is Status.SKIP


def test_an_interface_of_1500_warns_with_the_command(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(addressing.packet_size)
    assert found.status is Status.WARN and "mlx5_1/1 path MTU 1024 (eth3 mtu 1500)" in found.found
    assert commands(found)["host"].startswith("sudo ip link set eth3 mtu 9000") and "9216" in commands(found)["switch"]


def test_without_the_library_the_interface_tells(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("rxe").answer(verbs=None).write("sys/class/net/roce0/mtu", "2200")
    found = machine.check(addressing.packet_size)
    assert found.status is Status.WARN and "rxe0/1 path MTU 2048" in found.found and "switch" not in commands(found)


def test_a_small_infiniband_mtu_is_the_subnet_manager_s(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").opened("mlx5_0", ports={"1": {"active_mtu": 2048}})
    found = machine.check(addressing.packet_size)
    assert found.status is Status.WARN and "opensm" in commands(found)["switch"]


def test_ends_that_differ_warn(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").answer(paths={"10.1.0.8": 9000})
    machine.write("sys/class/net/eth2/mtu", "4500")
    found = machine.check(addressing.packet_size, "gpu08-roce")
    assert found.status is Status.WARN and "(eth2 mtu 4500); gpu08-roce has mtu 9000" in found.found


@pytest.mark.parametrize(("largest", "status", "words"), [
    (1500, Status.FAIL, "packets of 1500 do"), (4200, Status.WARN, "packets of 4192 do"),
    (9000, Status.WARN, "mlx5_1/1 path MTU 1024")])
def test_packets_that_do_not_arrive_fail_where_rdma_needs_them(largest: int, status: Status, words: str,
                                                               recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").answer(paths={"10.1.0.8": largest})
    found = machine.check(addressing.packet_size, "gpu08-roce")
    assert found.status is status and words in found.found


def test_a_peer_that_answers_no_ping_says_nothing_about_sizes(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").answer(paths={}).check(addressing.packet_size, "gpu08-roce")
    assert "do not reach" not in found.found
