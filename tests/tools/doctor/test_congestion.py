"""RD09 on recorded machines."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import fabric
from bpsfast.tools.doctor.finding import Status
from tests.sysfs_trees.machine import Machine, commands

COUNTERS = "sys/class/infiniband/mlx5_1/ports/1/hw_counters"


def test_losses_warn_with_the_counters_and_the_switch_s_part(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").check(fabric.loss)
    assert found.status is Status.WARN
    assert "local_ack_timeout_err 2705" in found.found and "rx_discards_phy 3499" in found.found
    assert commands(found)["host"].startswith("sudo dcb pfc set dev eth3 prio-pfc all:off 3:on")
    assert "PFC" in commands(found)["switch"] and "DSCP 26" in commands(found)["switch"]


def _healthy(machine: Machine) -> Machine:
    for name in ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err"):
        machine.write(f"{COUNTERS}/{name}", "3")  # of 7e10 packets: noise
    return machine.answer(statistics={})


def test_a_network_without_protection_is_told_before_it_loses(recorded_machine: Callable[[str], Machine]) -> None:
    found = _healthy(recorded_machine("mlx5_roce")).check(fabric.loss)
    assert found.status is Status.INFO and "nothing protects RoCE" in found.found and "eth3" in commands(found)["ecn"]


def test_a_protected_network_without_losses_passes(recorded_machine: Callable[[str], Machine]) -> None:
    machine = _healthy(recorded_machine("mlx5_roce")).answer(pause_priorities={"eth2": [3], "eth3": [3]})
    found = machine.check(fabric.loss)
    assert found.status is Status.PASS and "eth3: PFC on priority 3" in found.found


def test_a_driver_that_shows_nothing_is_named_so(recorded_machine: Callable[[str], Machine]) -> None:
    machine = _healthy(recorded_machine("mlx5_roce")).answer(pause_priorities={"eth2": [3]})
    found = machine.remove("sys/class/net/eth3/ecn").check(fabric.loss)
    assert found.status is Status.PASS and "eth3: the driver does not show PFC, ECN or DCQCN here" in found.found


def test_damage_on_an_infiniband_link_warns(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("infiniband")
    assert machine.check(fabric.loss).status is Status.PASS
    machine.write("sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error", "99999999")
    found = machine.check(fabric.loss)
    assert found.status is Status.WARN and "ibqueryerrors" in commands(found)["host"]


@pytest.mark.parametrize("name", ["rxe", "efa", "none"])
def test_what_has_no_flow_control_is_skipped(name: str, recorded_machine: Callable[[str], Machine]) -> None:
    assert recorded_machine(name).check(fabric.loss).status is Status.SKIP


def test_what_the_driver_shows_is_read(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").write("sys/kernel/debug/mlx5/0000:b0:00.0/cc_params/np_cnp_dscp", "48")
    facts = machine.facts()
    first, second = (fabric.flow_control(facts, device, port) for device, port in facts.host.ports)
    assert (first.pause, first.notify, first.react) == ((3,), (3,), (3,))
    assert first.parameters == {"cnp_dscp": 48, "cnp_802p_prio": 6}
    assert (second.pause, second.notify, second.parameters) == ((), (), {"cnp_dscp": 48})
    assert str(second) == "PFC on no priority, ECN answered on no priority, obeyed on no priority, DCQCN cnp_dscp 48"
