"""RD10, RD12 on recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import memory
from bpsfast.tools.doctor.finding import Status
from tests.sysfs_trees.machine import Machine, commands


@pytest.mark.parametrize(("said", "status"), [
    ("unneeded", Status.PASS), ("enabled", Status.PASS), ("disabled: no memory", Status.WARN)])
def test_fork_safety_is_as_the_library_says(said: str, status: Status,
                                            recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("infiniband").verbs(fork=said).check(memory.fork)
    assert found.status is status
    if status is Status.WARN:
        assert "no memory" in found.found and "RDMAV_FORK_SAFE=1" in commands(found)["host"]


@pytest.mark.parametrize(("release", "status"), [
    ("5.12.0", Status.PASS), ("6.8.0-41-generic", Status.PASS), ("5.4.0-190-generic", Status.SKIP)])
def test_without_the_library_the_kernel_s_version_tells(release: str, status: Status,
                                                        recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").answer(verbs=None).write("proc/sys/kernel/osrelease", release)
    assert machine.check(memory.fork).status is status


def test_without_a_device_there_is_nothing_to_fork(recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine("none").check(memory.fork).status is Status.SKIP


def test_the_gpu_s_module_is_told_where_it_is_missing(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    missing = machine.check(memory.gpu_memory)
    assert missing.status is Status.INFO and "nvidia-peermem" in commands(missing)["docker"]
    machine.write("proc/modules", "nvidia 1 0 - Live 0x0\nnvidia_peermem 1 0 - Live 0x0")
    assert machine.check(memory.gpu_memory).status is Status.PASS
    assert recorded_machine("infiniband").check(memory.gpu_memory).status is Status.SKIP


def test_an_old_kernel_has_no_dma_buf(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").write("proc/sys/kernel/osrelease", "5.4.0")
    assert "nor has kernel 5.4.0 dma-buf" in machine.check(memory.gpu_memory).found
