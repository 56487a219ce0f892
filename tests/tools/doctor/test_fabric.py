"""RD06, RD13, RD14 on recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import fabric
from bpsfast.tools.doctor.finding import Status
from tests.sysfs_trees.machine import Machine, commands

BOTH = "=mlx5_0,mlx5_1"


def _two_rails(machine: Machine, links: list[str] | None, peer_ports: int = 2) -> Machine:
    says = machine.answers["peer"]
    return machine.answer(peer=says | {"used": says["used"][:peer_ports]}, links=links)


def test_active_ports_pass(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(fabric.port_state)
    assert found.status is Status.PASS and "mlx5_0/1 ACTIVE LinkUp 100 Gb/s RoCE (eth2)" in found.found


def test_one_idle_port_is_told_and_warned_of_if_it_is_asked_for(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband")
    found = machine.check(fabric.port_state)
    assert found.status is Status.INFO and "mlx5_1/1 sees no signal" in found.found
    assert "cable" in commands(found)["switch"]
    assert machine.check(fabric.port_state, rdma_devices="mlx5").status is Status.WARN


@pytest.mark.parametrize(("state", "phys", "sm_lid", "words", "where", "command"), [
    ("2: INIT", "5: LinkUp", "0x0", "waits for a subnet manager", "host", "opensm"),
    ("2: INIT", "5: LinkUp", "0x1", "not configured yet", "check", "sminfo"),
    ("1: DOWN", "2: Polling", "0x0", "no signal", "switch", "cable"),
    ("1: DOWN", "3: Disabled", "0x0", "switched off", "host", "ip link set ib0 up"),
])
def test_no_active_port_fails_with_the_cause(state: str, phys: str, sm_lid: str, words: str, where: str, command: str,
                                             recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband").remove("sys/class/infiniband/mlx5_1")
    for name, content in (("state", state), ("phys_state", phys), ("sm_lid", sm_lid)):
        machine.write(f"sys/class/infiniband/mlx5_0/ports/1/{name}", content)
    found = machine.check(fabric.port_state)
    assert found.status is Status.FAIL and "no port is ACTIVE" in found.found and words in found.found
    assert command in commands(found)[where]


def test_rails_that_reach_each_other_pass(recorded_machine: Callable[[str], Machine]) -> None:
    machine = _two_rails(recorded_machine("mlx5_roce"), None)
    assert machine.check(fabric.rails, "gpu08-roce", rdma_devices=BOTH).status is Status.PASS


def test_rails_that_cannot_be_asked_by_ping_are_no_fault(recorded_machine: Callable[[str], Machine]) -> None:
    machine = _two_rails(recorded_machine("mlx5_roce"), None)
    for name in ("eth2", "eth3"):  # as in a network namespace that lacks them
        machine.remove(f"sys/class/net/{name}")
    facts = machine.facts("gpu08-roce", rdma_devices=BOTH)
    assert fabric.rails(facts).status is Status.SKIP
    facts.trial_error = ""
    assert fabric.rails(facts).status is Status.PASS and "carried data" in fabric.rails(facts).found


def test_a_queue_pair_that_works_counts_more_than_a_ping_that_is_filtered(
        recorded_machine: Callable[[str], Machine]) -> None:
    facts = _two_rails(recorded_machine("mlx5_roce"), []).facts("gpu08-roce", rdma_devices=BOTH)
    assert fabric.rails(facts).status is Status.FAIL
    facts.trial_error = ""
    assert fabric.rails(facts).status is Status.PASS


def test_a_rail_only_network_is_told(recorded_machine: Callable[[str], Machine]) -> None:
    machine = _two_rails(recorded_machine("mlx5_roce"), ["eth2>10.1.0.8", "eth3>10.2.0.8"])
    found = machine.check(fabric.rails, "gpu08-roce", rdma_devices=BOTH)
    assert found.status is Status.INFO and "rail-only" in found.found


def test_crossed_rails_fail_and_the_pair_is_named(recorded_machine: Callable[[str], Machine]) -> None:
    machine = _two_rails(recorded_machine("mlx5_roce"), ["eth2>10.2.0.8", "eth3>10.1.0.8"])
    found = machine.check(fabric.rails, "gpu08-roce", rdma_devices=BOTH)
    assert found.status is Status.FAIL and "mlx5_0/1 (eth2) to mlx5_0/1 (10.1.0.8)" in found.found


def test_different_numbers_of_rails_warn(recorded_machine: Callable[[str], Machine]) -> None:
    machine = _two_rails(recorded_machine("mlx5_roce"), None, peer_ports=1)
    found = machine.check(fabric.rails, "gpu08-roce", rdma_devices=BOTH)
    assert found.status is Status.WARN and "would be used: 2 here (mlx5_0/1, mlx5_1/1), 1 at gpu08-roce" in found.found


def test_a_peer_without_a_port_fails_with_its_reasons(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband")
    says = machine.answers["peer"] | {"used": [], "rejected": {"mlx5_0/1": "the port is DOWN"}}
    found = machine.answer(peer=says).check(fabric.rails, "node043-ib")
    assert found.status is Status.FAIL and "mlx5_0/1: the port is DOWN" in found.found
    assert commands(found)["peer"] == "bpsfast doctor"


def test_rails_need_a_peer(recorded_machine: Callable[[str], Machine]) -> None:
    assert "--listen" in recorded_machine("mlx5_roce").check(fabric.rails).found
    assert recorded_machine("none").check(fabric.rails).status is Status.SKIP


def test_rdma_cm_is_told_where_it_is_missing(recorded_machine: Callable[[str], Machine]) -> None:
    missing = recorded_machine("mlx5_roce").check(fabric.filters)
    assert missing.status is Status.INFO and "--device=/dev/infiniband/rdma_cm" in commands(missing)["docker"]
    assert recorded_machine("rxe").check(fabric.filters).status is Status.PASS


def test_a_peer_that_cannot_connect_back_fails(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband")
    machine.answer(peer=machine.answers["peer"] | {"reached": "no answer"})
    found = machine.check(fabric.filters, "node043-ib")
    assert found.status is Status.FAIL and "cannot connect back" in found.found and "4791" in commands(found)["host"]


def test_a_queue_pair_that_carried_nothing_fails_and_one_that_did_is_told(
        recorded_machine: Callable[[str], Machine]) -> None:
    facts = recorded_machine("infiniband").facts("node043-ib")
    facts.trial_error = "IBV_WC_RETRY_EXC_ERR"
    found = fabric.filters(facts)
    assert found.status is Status.FAIL and "IBV_WC_RETRY_EXC_ERR" in found.found
    facts.trial_error = ""
    assert "carried data" in fabric.filters(facts).found and fabric.filters(facts).status is Status.PASS


def test_a_peer_without_a_doctor_is_a_warning(recorded_machine: Callable[[str], Machine]) -> None:
    facts = recorded_machine("infiniband").facts("node043-ib", peer_says=False)
    facts.peer_silence = "no doctor answers at node043-ib port 1: Connection refused"
    found = fabric.filters(facts)
    assert found.status is Status.WARN and "Connection refused" in found.found
    assert commands(found)["peer"] == "bpsfast doctor --listen"
    assert "Connection refused" in fabric.rails(facts).found
