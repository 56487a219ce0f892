"""RD03, RD04, RD15, RD16 on recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import driver
from bpsfast.tools.doctor.finding import Status
from tests.sysfs_trees.machine import Machine, commands


def test_a_library_that_lists_all_devices_passes(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("infiniband").check(driver.provider)
    assert found.status is Status.PASS and "mlx5_0, mlx5_1" in found.found


def test_a_missing_library_fails_with_the_package_of_the_distribution(
        recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("infiniband").verbs(error="libibverbs.so.1 cannot be loaded").check(driver.provider)
    assert found.status is Status.FAIL and "libibverbs.so.1" in found.found
    assert commands(found)["host"] == "sudo dnf install libibverbs rdma-core"


def test_a_missing_provider_fails_and_names_the_devices(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").verbs(devices={}).check(driver.provider)
    assert found.status is Status.FAIL and "mlx5_0, mlx5_1" in found.found and "mlx5_core" in found.found
    assert commands(found)["host"] == "sudo apt install libibverbs1 ibverbs-providers"
    assert "image" in commands(found)["docker"]


@pytest.mark.parametrize(("distribution", "tool"), [
    ("ID=debian", "apt"), ("ID=fedora", "dnf"), ('ID="opensuse-leap"\nID_LIKE="suse opensuse"', "zypper"),
    ("ID=arch", "pacman"), ("ID=alpine", "apk"), ("ID=plan9", "of your distribution"),
])
def test_every_distribution_has_its_command(distribution: str, tool: str,
                                            recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").write("etc/os-release", distribution).verbs(error="gone")
    assert tool in commands(machine.check(driver.provider))["host"]


def test_a_card_without_its_rdma_module_fails(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").remove("sys/class/infiniband").remove(".dockerenv")
    machine.write("proc/modules", "mlx5_core 16384 0 - Live 0x0")
    found = machine.check(driver.provider)
    assert found.status is Status.FAIL and "eth2 (mlx5_core), eth3 (mlx5_core)" in found.found
    assert commands(found)["host"] == "sudo modprobe -a mlx5_ib"


def test_a_machine_without_rdma_is_no_fault(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("none").check(driver.provider)
    assert found.status is Status.INFO and "eth0 (virtio_net)" in found.found


def test_a_library_that_nobody_asked_is_skipped(recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine("infiniband").answer(verbs=None).check(driver.provider).status is Status.SKIP


def test_device_files_that_open_pass(recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine("infiniband").check(driver.device_nodes).status is Status.PASS


def test_a_device_file_that_a_container_lacks_fails_with_the_option(
        recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").remove("dev/infiniband/uverbs1").check(driver.device_nodes)
    assert found.status is Status.FAIL and found.found == "/dev/infiniband/uverbs1 (mlx5_1): not there"
    assert commands(found)["docker"].startswith("docker run --device=/dev/infiniband/uverbs0 --device=/dev/infiniband/"
                                                "uverbs1 --device=/dev/infiniband/rdma_cm")


def test_a_device_file_that_cannot_be_opened_fails_with_the_reason(
        recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").remove("dev/infiniband/uverbs0")
    (machine.root / "dev/infiniband/uverbs0").mkdir()  # opening a folder for writing fails for root too
    found = machine.check(driver.device_nodes)
    assert found.status is Status.FAIL and "Is a directory" in found.found and "rdma" in commands(found)["host"]


def test_a_missing_module_fails(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("infiniband").remove("sys/class/infiniband_verbs").check(driver.device_nodes)
    assert found.status is Status.FAIL and commands(found)["host"] == "sudo modprobe ib_uverbs"


@pytest.mark.parametrize(("name", "status", "words"), [
    ("efa", Status.INFO, "Amazon EFA"), ("rxe", Status.INFO, "Soft-RoCE"), ("infiniband", Status.PASS, "mlx5_core"),
    ("none", Status.SKIP, "no RDMA device"),
])
def test_special_devices_are_told(name: str, status: Status, words: str,
                                  recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine(name).check(driver.kind)
    assert found.status is status and words in found.found


def test_every_port_that_is_not_used_has_its_reason(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("infiniband").check(driver.usability)
    assert found.status is Status.INFO and "mlx5_0/1 can be used" in found.found and "mlx5_1/1: the port" in found.found
    efa = recorded_machine("efa").check(driver.usability)
    assert efa.status is Status.WARN and "no port can be used: rdmap16s27/1: EFA" in efa.found
    assert recorded_machine("rxe").check(driver.usability).status is Status.PASS


def test_a_device_that_cannot_be_opened_fails_with_the_reason(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").opened("mlx5_0", error="ibv_open_device: firmware is gone")
    found = machine.check(driver.usability)
    assert found.status is Status.FAIL and "mlx5_0: ibv_open_device: firmware is gone" in found.found
