"""Which functions on PCIe are one network card, and what goes through its wires."""
from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from bpsfast.hardware.topology.discovery import cards
from tests.sysfs_trees.machine import Machine

PORT = "sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:03.0"

Machines = Callable[[str], Machine]


def found(machine: Machine) -> list[tuple[str, str, float]]:
    """Return address, devices and rate of each card."""
    return [(card.location.address, ",".join(card.devices), card.rate_bytes) for card in cards(machine.host)]


def test_functions_in_one_slot_are_one_card(recorded_machine: Machines) -> None:
    machine = recorded_machine("asymmetric_3_5")
    assert found(machine) == [("0000:46:00.0", "mlx5_0,mlx5_1", 12.5e9)]
    # a port without a cable carries nothing
    machine.write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    assert found(machine) == [("0000:46:00.0", "mlx5_0", 6.25e9)]
    # without the RDMA driver there are the interfaces
    assert found(machine.remove("sys/class/infiniband")) == [("0000:46:00.0", "ens4f0,ens4f1", 12.5e9)]


def test_a_virtual_function_counts_where_its_card_cannot_be_seen(recorded_machine: Machines) -> None:
    machine = recorded_machine("asymmetric_3_5").remove("sys/class/infiniband").remove("sys/class/net/ens4f1")
    machine.write("sys/class/net/ens4f0/operstate", "down")
    assert found(machine) == [], "its card's wire is not up"
    machine.remove("sys/class/net/ens4f0")  # a container that was given functions alone
    assert found(machine) == [("0000:46:01.0", "ens4f0v0,ens4f0v1", 6.25e9)]
    machine.remove("sys/class/net/ens4f0v1")
    assert found(machine) == [("0000:46:01.0", "ens4f0v0", 6.25e9)]
    assert found(machine.remove(f"{PORT}/0000:46:01.0/physfn")) == [("0000:46:01.0", "ens4f0v0", 6.25e9)]


def test_what_is_not_plugged_in_is_left_out_and_named_in_the_log(recorded_machine: Machines,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bpsfast")
    assert found(recorded_machine("cpu_two_socket")) == [
        ("0000:01:00.0", "eno1", 1.25e9), ("0000:c1:00.0", "mlx5_0", 12.5e9)]
    assert [record.getMessage().split()[0] for record in caplog.records] == ["mlx5_1", "eno2"]


def test_cards_in_software_are_none_and_virtual_ones_have_no_rate(recorded_machine: Machines) -> None:
    assert found(recorded_machine("rxe")) == []
    assert found(recorded_machine("none")) == [("0000:00:03.0", "eth0", 0.0)]


def test_an_rdma_device_speaks_for_the_interface_of_its_function(recorded_machine: Machines) -> None:
    machine = recorded_machine("pcie_2x4").write("sys/class/net/ens3/speed", "1000")
    assert found(machine) == [("0000:0a:00.0", "mlx5_0", 12.5e9)]
    assert cards(machine.host)[0].model == "MT4119"
