"""RD01, RD02, RD20 on recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import memory
from bpsfast.tools.doctor.finding import Status
from tests.sysfs_trees.machine import Machine, commands

ROOT_CAPABLE = "Name:\tpython3\nUid:\t0\t0\t0\t0\nCapEff:\t0000000000004000"


def test_no_limit_passes(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("infiniband").check(memory.locked_memory)
    assert found.status is Status.PASS and "unlimited" in found.found and "64 MiB" in found.found


@pytest.mark.parametrize(("limit", "words"), [("65536", "64 KiB"), ("8388608", "8 MiB")])
def test_a_distribution_s_limit_fails_with_the_numbers_and_what_to_type(
        limit: str, words: str, recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("infiniband").locked(limit).check(memory.locked_memory)
    assert found.status is Status.FAIL
    assert found.found.startswith(f"{words} (hard limit unlimited), need at least 64 MiB")
    assert commands(found)["now"].startswith("ulimit -l unlimited")
    assert "limits.d" in commands(found)["host"] and "LimitMEMLOCK" in commands(found)["host"]
    assert "slurmd" in commands(found)["slurm"]


def test_a_large_limit_warns(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("infiniband").locked(str(4 << 30), str(4 << 30)).check(memory.locked_memory)
    assert found.status is Status.WARN and "4 GiB" in found.found and "now" not in commands(found)


def test_the_trial_counts_more_than_the_limit(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").locked(str(4 << 30))
    machine.opened("mlx5_0", registered_nbytes=1 << 20, registration_error="ENOMEM here")
    found = machine.check(memory.locked_memory)
    assert found.status is Status.FAIL and "mlx5_0 registered 1 MiB, then: ENOMEM here" in found.found


def test_the_capability_lifts_the_limit(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").locked("65536")
    machine.write("proc/self/status", ROOT_CAPABLE.replace("0\t", "7\t"))
    found = machine.check(memory.locked_memory)
    assert found.status is Status.PASS and "CAP_IPC_LOCK" in found.found


def test_what_root_may_is_not_what_a_user_may(recorded_machine: Callable[[str], Machine]) -> None:
    """A doctor that is run by root sees the limit of the jobs that others run."""
    machine = recorded_machine("infiniband").locked("65536").write("proc/self/status", ROOT_CAPABLE)
    found = machine.check(memory.locked_memory)
    assert found.status is Status.INFO and "limits.d" in commands(found)["host"]
    assert found.found.startswith("64 KiB, lifted by CAP_IPC_LOCK for root, but an ordinary user may lock 64 KiB (as ")


@pytest.mark.parametrize(("lines", "status", "words"), [
    ("* soft memlock 64\n", Status.INFO, "unlimited for root, but an ordinary user may lock 64 KiB "
                                        "(/etc/security/limits.d/90-rdma.conf), too little"),
    ("*\t-\tmemlock 8192 # KB\n", Status.INFO, "may lock 8 MiB"), ("* - memlock unlimited\n", Status.PASS, "unlimited"),
    ("#* soft memlock 64\nroot soft memlock 64\n* hard memlock 64\n* soft nofile 64\n", Status.PASS, "unlimited"),
    ("* soft memlock 64\n* soft memlock -1\n", Status.PASS, "unlimited"),
    ("* soft memlock many", Status.PASS, "unlimited"),
])
def test_the_limit_of_a_login_is_read(lines: str, status: Status, words: str,
                                      recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").locked("unlimited").write("proc/self/status", ROOT_CAPABLE)
    machine.write("etc/security/limits.conf", "* soft memlock 1024\n* soft memlock unlimited\n")
    found = machine.write("etc/security/limits.d/90-rdma.conf", lines).check(memory.locked_memory)
    assert found.status is status and words in found.found


def test_a_login_that_is_older_than_its_limit_is_told_so(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").locked("65536")
    found = machine.write("etc/security/limits.d/90-rdma.conf", "* - memlock unlimited").check(memory.locked_memory)
    assert found.status is Status.FAIL
    assert "64 KiB (hard limit unlimited), though /etc/security/limits.d/90-rdma.conf gives no limit" in found.found


def test_the_capability_of_a_user_namespace_does_not(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").locked("65536").write("proc/self/status", ROOT_CAPABLE)
    found = machine.write("proc/self/uid_map", "0 100000 65536").check(memory.locked_memory)
    assert found.status is Status.FAIL and "user namespace" in found.found


@pytest.mark.parametrize(("path", "where", "words"), [
    (".dockerenv", "docker", "--ulimit memlock=-1"), ("run/.containerenv", "docker", "--ulimit memlock=-1"),
    ("var/run/secrets/kubernetes.io/x", "k8s", "container runtime"),
])
def test_the_advice_fits_the_container(path: str, where: str, words: str,
                                       recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("infiniband").locked("65536").write(path, "").check(memory.locked_memory)
    assert words in commands(found)[where] and "host" not in commands(found)


def test_without_a_device_the_limit_is_no_fault(recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine("none").check(memory.locked_memory).status is Status.SKIP
    found = recorded_machine("none").locked("65536").check(memory.locked_memory)
    assert found.status is Status.SKIP and "64 KiB, less than RDMA needs (bpsfast explain RD01)" in found.found


def test_registration_that_fails_without_a_limit_is_another_fault(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").opened("mlx5_0", registered_nbytes=0, registration_error="no room")
    assert machine.check(memory.locked_memory).status is Status.PASS
    found = machine.check(memory.registrations)
    assert found.status is Status.FAIL and "mlx5_0 registered nothing, then: no room" in found.found
    assert "vm.max_map_count" in commands(found)["host"]


def test_few_mappings_and_few_regions_warn(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband")
    assert machine.check(memory.registrations).status is Status.PASS
    machine.opened("mlx5_0", attributes={"max_mr": 100})
    few = machine.check(memory.registrations)
    assert few.status is Status.WARN and "max_mr mlx5_0 100" in few.found
    low = recorded_machine("rxe").write("proc/sys/vm/max_map_count", "1000").check(memory.registrations)
    assert low.status is Status.WARN and "max_map_count 1000" in low.found


def test_mappings_that_are_half_used_up_warn(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").write("proc/self/maps", "x\n" * 40_000)
    found = machine.check(memory.registrations)
    assert found.status is Status.WARN and "40000 mappings" in found.found


@pytest.mark.parametrize(("nbytes", "status"), [(64 << 20, Status.INFO), (None, Status.INFO), (8 << 30, Status.PASS)])
def test_a_small_dev_shm_is_told(nbytes: int | None, status: Status,
                                 recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").answer(shm_nbytes=nbytes).check(memory.shared_memory)
    assert found.status is status
    if status is Status.INFO:
        assert "docker run" in commands(found)["docker"]
