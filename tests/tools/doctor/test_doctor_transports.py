"""RD17, RD19 on recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import transports
from bpsfast.tools.doctor.finding import Status
from tests.sysfs_trees.machine import Machine, commands


@pytest.mark.parametrize(("name", "transport", "status", "words"), [
    ("infiniband", "auto", Status.PASS, "rdma over mlx5_0/1"), ("infiniband", "rdma", Status.PASS, "rdma (by command"),
    ("infiniband", "tcp", Status.WARN, "leaves mlx5_0/1 unused"), ("infiniband", "shm", Status.WARN, "unused"),
    ("none", "auto", Status.INFO, "tcp between machines"), ("none", "rdma", Status.FAIL, "no RDMA port can be used"),
    ("none", "tcp", Status.PASS, "tcp (by command line)"),
])
def test_the_setting_is_held_against_the_machine(name: str, transport: str, status: Status, words: str,
                                                 recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine(name).check(transports.setting, transport=transport)
    assert found.status is status and words in found.found


def test_a_device_that_does_not_exist_fails_and_the_others_are_listed(
        recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("infiniband").check(transports.setting, rdma_devices="=mlx5_7")
    assert found.status is Status.FAIL and "mlx5_7" in found.found and "mlx5_0:1, mlx5_1:1" in found.found
    assert "command line" in found.found


@pytest.mark.parametrize(("says", "words"), [
    ({"version": "9.9.9"}, "9.9.9 at node043-ib"), ({"transport": "tcp"}, "transport auto here (by default), tcp at")])
def test_ends_that_disagree_fail(says: dict[str, str], words: str, recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband")
    assert machine.check(transports.setting, "node043-ib").status is Status.PASS
    found = machine.answer(peer=machine.answers["peer"] | says).check(transports.setting, "node043-ib")
    assert found.status is Status.FAIL and words in found.found


def test_defaults_suffice(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(transports.tcp)
    assert found.status is Status.PASS and "cubic, buffers up to 6 MiB in, 4 MiB out" in found.found


def test_small_buffers_one_stream_and_one_queue_warn_on_a_fast_card(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").write("proc/sys/net/ipv4/tcp_rmem", "4096 131072 212992")
    for queue in range(1, 8):
        machine.remove(f"sys/class/net/eth3/queues/rx-{queue}")
    found = machine.check(transports.tcp, tcp_streams=1)
    assert found.status is Status.WARN
    for words in ("buffers are small for 100 Gb/s", "one stream", "eth3 has one receive queue"):
        assert words in found.found
    assert commands(found)["host"].startswith("sudo sysctl -w net.ipv4.tcp_rmem=")
    assert "ethtool -L eth3" in commands(found)["check"] and commands(found)["job"] == "BPSFAST_TCP_STREAMS=4"


def test_a_slow_card_needs_nothing(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("none").write("proc/sys/net/ipv4/tcp_rmem", "4096 131072 212992")
    assert machine.check(transports.tcp, tcp_streams=1).status is Status.PASS


@pytest.mark.parametrize(("given", "status", "words"), [
    ({}, Status.PASS, ["tcp between machines is encrypted, RDMA is not", "no job key here"]),
    ({"job_key": "ab" * 32, "encryption": "on"}, Status.PASS, ["is encrypted; a job key is given"]),
    ({"encryption": "off"}, Status.INFO, ["encryption=off", "anyone on the network"]),
    ({"insecure": True}, Status.WARN, ["BPSFAST_INSECURE=1", "can join it, read and change its sums"]),
])
def test_whoever_goes_without_protection_is_told(recorded_machine, given, status, words):
    found = recorded_machine("none").check(transports.protection, **given)
    assert found.status is status and all(word in found.found for word in words), found
    assert "ab" * 32 not in found.found
