"""What a card counts, and what growth means."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from bpsfast.hardware import nic_counters
from bpsfast.hardware.nic_counters import CounterMeaning, CounterSnapshot
from tests.sysfs_trees.machine import Machine

HW = "sys/class/infiniband/mlx5_0/ports/1/hw_counters"


def snap(machine: Machine, netdev: str | None = None) -> CounterSnapshot:
    host = machine.host
    return nic_counters.snapshot(host.tree, "mlx5_0", 1, netdev=netdev, kernel=host.kernel)


def test_a_snapshot_holds_all_counters_in_bytes(recorded_machine: Callable[[str], Machine]) -> None:
    found = snap(recorded_machine("mlx5_roce"))
    assert found.values["port_rcv_data"] == 4 * 9_000_000_000_000 and found.values["rp_cnp_handled"] == 118
    assert found.lifespan_s == 0.01 and "lifespan" not in found.values and "rx_prio3_pause" not in found.values


def test_pause_frames_and_discards_come_from_the_interface(recorded_machine: Callable[[str], Machine]) -> None:
    found = snap(recorded_machine("mlx5_roce"), "eth2")
    assert found.values["rx_prio3_pause"] == 4211 and found.values["rx_discards_phy"] == 0


def test_a_device_without_counters_gives_none(recorded_machine: Callable[[str], Machine]) -> None:
    found = nic_counters.snapshot(recorded_machine("none").host.tree, "mlx5_0", 1)
    assert not found.values
    assert nic_counters.difference(found, found).line().endswith("none of a kind that is known")


def test_what_grew_is_told_by_what_it_means(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    before = snap(machine)
    for name, value in (("out_of_sequence", 5), ("np_cnp_sent", 121), ("rnr_nak_retry_err", 2),
                        ("resp_remote_access_errors", 1)):
        machine.write(f"{HW}/{name}", str(value))
    delta = nic_counters.difference(before, snap(machine))
    assert delta.of(CounterMeaning.LOSS) == {"out_of_sequence": 5}
    assert delta.of(CounterMeaning.CONGESTION) == {"np_cnp_sent": 1}
    assert delta.of(CounterMeaning.RECEIVER) == {"rnr_nak_retry_err": 2} and not delta.is_clean and not delta.restarted
    assert delta.verdicts()[0] == "packets were lost and sent again (out_of_sequence 5)" and len(delta.verdicts()) == 4
    assert delta.line().startswith("# NIC counters (delta) : mlx5_0/1  out_of_sequence 5  local_ack_timeout_err 0  ")


def test_nothing_that_grew_is_clean(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    before = snap(machine)
    machine.write("sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_packets", "99999999999999")
    delta = nic_counters.difference(before, snap(machine))
    assert delta.is_clean and not delta.verdicts() and delta.of(CounterMeaning.TRAFFIC)["port_rcv_packets"] > 0
    assert "out_of_sequence 0" in delta.line()


def test_counters_that_went_back_count_from_zero(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce").write(f"{HW}/out_of_sequence", "100")
    before = snap(machine)
    machine.write(f"{HW}/out_of_sequence", "3")
    delta = nic_counters.difference(before, snap(machine))
    assert delta.restarted and delta.changes["out_of_sequence"] == 3


def test_snapshots_within_the_driver_s_cache_are_marked(recorded_machine: Callable[[str], Machine]) -> None:
    first = snap(recorded_machine("mlx5_roce"))
    soon = dataclasses.replace(first, at_s=first.at_s + 0.001)
    later = dataclasses.replace(first, at_s=first.at_s + 1)
    assert nic_counters.difference(first, soon).too_soon and not nic_counters.difference(first, later).too_soon


def test_two_ports_have_no_difference(recorded_machine: Callable[[str], Machine]) -> None:
    first = snap(recorded_machine("mlx5_roce"))
    with pytest.raises(ValueError, match="no difference"):
        nic_counters.difference(first, dataclasses.replace(first, device="mlx5_1"))


@pytest.mark.parametrize(("name", "meaning"), [
    ("local_ack_timeout_err", CounterMeaning.LOSS), ("rx_prio5_discards", CounterMeaning.LOSS),
    ("rx_prio3_pause", CounterMeaning.CONGESTION),
    ("rp_cnp_handled", CounterMeaning.CONGESTION), ("symbol_error", CounterMeaning.LINK),
    ("out_of_buffer", CounterMeaning.RECEIVER),
    ("port_xmit_data", CounterMeaning.TRAFFIC), ("req_remote_access_errors", CounterMeaning.REFUSED),
    ("whatever", CounterMeaning.OTHER)])
def test_names(name: str, meaning: CounterMeaning) -> None:
    assert nic_counters.meaning_of(name) is meaning
