"""What all checks look at, on recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sysfs_trees.machine import Machine


@pytest.mark.parametrize(("name", "container", "uid", "user"), [
    ("mlx5_roce", "docker", 1000, "ana"), ("infiniband", "", 20417, "mira"), ("rxe", "", 0, "root")])
def test_who_and_where(name: str, container: str, uid: int, user: str,
                       recorded_machine: Callable[[str], Machine]) -> None:
    facts = recorded_machine(name).facts()
    assert (facts.container, facts.uid, facts.user) == (container, uid, user)


@pytest.mark.parametrize(("line", "container"), [
    ("0::/kubepods/burstable/pod1", "kubernetes"), ("12:cpu:/docker/abc", "docker"), ("0::/libpod-1", "podman"),
    ("0::/system.slice/containerd.service", "container"), ("0::/lxc/c1", "container"), ("0::/init.scope", "")])
def test_a_container_by_its_control_group(line: str, container: str,
                                          recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine("rxe").write("proc/1/cgroup", line).facts().container == container


def test_a_container_by_its_environment(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("rxe").answer(environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert machine.facts().container == "kubernetes"
    assert recorded_machine("infiniband").facts().in_slurm and not recorded_machine("rxe").facts().in_slurm


@pytest.mark.parametrize(("soft", "hard", "limits"), [
    ("65536", "unlimited", (65536, None)), ("unlimited", "unlimited", (None, None)), ("8388608", "16777216",
                                                                                     (8 << 20, 16 << 20))])
def test_limits_of_locked_memory(soft: str, hard: str, limits: tuple[int | None, int | None],
                                 recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine("rxe").locked(soft, hard).facts().memlock_nbytes == limits


def test_the_way_to_put_it_right_is_by_where_we_run(recorded_machine: Callable[[str], Machine]) -> None:
    def ways(machine: Machine) -> dict[str, str]:
        return machine.facts().variants("h", "d", "k", "s")

    assert ways(recorded_machine("rxe")) == {"host": "h"}
    assert ways(recorded_machine("infiniband")) == {"host": "h", "slurm": "s"}
    assert ways(recorded_machine("mlx5_roce")) == {"docker": "d"}
    assert ways(recorded_machine("rxe").write("proc/1/cgroup", "0::/lxc/c1")) == {"docker": "d", "k8s": "k"}
    assert ways(recorded_machine("rxe").write("proc/1/cgroup", "0::/kubepods/x")) == {"k8s": "k"}


def test_settings_that_contradict_the_machine_are_told_and_do_not_hide_it(
        recorded_machine: Callable[[str], Machine]) -> None:
    facts = recorded_machine("mlx5_roce").facts(rdma_devices="mlx5_9")
    assert "mlx5_9" in facts.choice_error and [rail.name for rail in facts.choice.rails] == ["mlx5_0/1", "mlx5_1/1"]
    assert recorded_machine("mlx5_roce").facts().choice_error == ""


def test_used_usable_and_capable(recorded_machine: Callable[[str], Machine]) -> None:
    facts = recorded_machine("mlx5_roce").facts()
    assert [rail.device for rail in facts.choice.rails] == ["mlx5_0", "mlx5_1"]
    assert [device.name for device, _ in facts.usable] == ["mlx5_0", "mlx5_1"]
    assert facts.path_mtus == {"mlx5_0/1": 4096, "mlx5_1/1": 1024}
    efa = recorded_machine("efa").facts()
    assert efa.capable == [] and efa.usable == [] and len(efa.host.devices) == 1
    assert len(recorded_machine("infiniband").facts().capable) == 2


@pytest.mark.parametrize(("release", "version"), [("6.8.0-41-generic", (6, 8)), ("5.14.0", (5, 14)), ("odd", (0, 0))])
def test_the_kernel_s_version(release: str, version: tuple[int, int],
                              recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine("rxe").write("proc/sys/kernel/osrelease", release).facts().kernel_version == version
