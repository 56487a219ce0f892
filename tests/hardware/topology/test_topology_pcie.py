"""Where devices hang on PCIe, which bridges are switches, and how fast links are."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.hardware.sysfs import Tree
from bpsfast.hardware.topology import pcie
from bpsfast.hardware.topology.pcie import PcieBranch, PcieLocation
from tests.sysfs_trees.machine import Machine

Machines = Callable[[str], Machine]
ROOT = "sys/devices/pci0000:00"
GEN3_LANE = 8e9 * 128 / 130 / 8


def at(*addresses: str) -> PcieLocation:
    """Return the place below bridges; "2:00.0" is 0000:02:00.0."""
    words = [f"0000:{address:0>7}" for address in addresses]
    return PcieLocation(tuple("/".join([ROOT, *words[:depth + 1]]) for depth in range(len(words))))


def shape(hub: PcieBranch) -> object:
    """Return a hub as (bridges on its way up, what is below): nested tuples of the last addresses."""
    last = [folder.rpartition("/")[2].removeprefix("0000:") for folder in hub.bridges]
    return (*last, [shape(below) for below in hub.below]) if hub.below else tuple(last)


def test_devices_at_the_host_bridge_have_no_switch() -> None:
    assert pcie.branches([]) == []
    assert [shape(hub) for hub in pcie.branches([at("00:04.0"), at("00:05.0")])] == [("00:04.0",), ("00:05.0",)]


def test_switches_are_bridges_with_two_ways_down() -> None:
    places = [at("00:01.0", "01:00.0", "02:00.0", "03:00.0"), at("00:01.0", "01:00.0", "02:04.0", "04:00.0")]
    assert [shape(hub) for hub in pcie.branches(places)] == [
        ("00:01.0", "01:00.0", [("02:00.0", "03:00.0"), ("02:04.0", "04:00.0")])]
    # with one device below it, it is part of that one's link
    assert [shape(hub) for hub in pcie.branches(places[:1])] == [("00:01.0", "01:00.0", "02:00.0", "03:00.0")]


def test_a_root_port_is_no_switch() -> None:
    places = [at("00:01.0", "01:00.0"), at("00:01.0", "01:01.0"), at("00:02.0", "02:00.0")]
    assert [shape(hub) for hub in pcie.branches(places)] == [
        ("00:01.0", "01:00.0"), ("00:01.0", "01:01.0"), ("00:02.0", "02:00.0")]


def test_a_switch_below_a_switch_and_a_bridge_on_a_card() -> None:
    upper = ("00:01.0", "01:00.0")
    places = [at(*upper, "02:00.0", "04:00.0"),
              at(*upper, "02:01.0", "05:00.0", "06:00.0", "07:00.0"),
              at(*upper, "02:01.0", "05:00.0", "06:01.0", "08:00.0"),
              at(*upper, "02:02.0", "09:00.0", "0a:00.0", "0b:00.0")]
    (hub,) = pcie.branches(places)
    assert shape(hub) == (*upper, [
        ("02:00.0", "04:00.0"), ("02:01.0", "05:00.0", [("06:00.0", "07:00.0"), ("06:01.0", "08:00.0")]),
        ("02:02.0", "09:00.0", "0a:00.0", "0b:00.0")])
    assert [slot.rpartition("/")[2] for slot in hub.leaves] == ["0000:04:00", "0000:07:00", "0000:08:00", "0000:0b:00"]


def test_functions_in_one_slot_are_one_device() -> None:
    assert [shape(hub) for hub in pcie.branches([at("00:01.0", "01:00.0"), at("00:01.0", "01:00.1")])] == [
        ("00:01.0", "01:00.0")]


def test_places_of_links(recorded_machine: Machines) -> None:
    machine = recorded_machine("none")
    tree = machine.host.tree
    found = pcie.locate(tree, "sys/class/net/eth0/device")  # .../0000:00:03.0/virtio0
    assert found is not None and found.folders == (f"{ROOT}/0000:00:03.0",) and found.address == "0000:00:03.0"
    assert found.slot == f"{ROOT}/0000:00:03"
    for target in (f"{ROOT}/0000:00:14.0/usb1/1-1/1-1:1.0", "sys/devices/virtual/net/lo", ROOT):
        folder = machine.root / target
        folder.mkdir(parents=True, exist_ok=True)
        (machine.root / "link").symlink_to(folder)
        assert pcie.locate(tree, "link") is None
        machine.remove("link")
    assert pcie.locate(tree, "sys/class/net/lo/device") is None and pcie.locate(tree, "sys/bus/pci/devices/x") is None


def test_an_idle_gpus_link_counts_as_awake_but_not_wider_than_it_is(recorded_machine: Machines) -> None:
    machine = recorded_machine("pcie_2x4")
    port = f"{ROOT}/0000:00:02.0/0000:02:00.0/0000:03:04.0"
    way = (port, f"{port}/0000:04:00.0")
    assert pcie.rate_bytes(machine.host.tree, way, sleeps=True) == pytest.approx(16 * GEN3_LANE)
    assert pcie.rate_bytes(machine.host.tree, way) == 4e9  # 2.5 GT/s, 8b/10b
    machine.write(f"{port}/0000:04:00.0/current_link_width", "8")
    assert pcie.rate_bytes(machine.host.tree, way, sleeps=True) == pytest.approx(8 * GEN3_LANE)
    # the slower end decides
    machine.write(f"{port}/max_link_speed", "5.0 GT/s PCIe").write(f"{port}/current_link_width", "8")
    assert pcie.rate_bytes(machine.host.tree, way, sleeps=True) == 4e9


@pytest.mark.parametrize("speed", ["Unknown", "0.0 GT/s PCIe", ""])
def test_a_link_of_which_nothing_is_told_has_a_default(speed: str, recorded_machine: Machines) -> None:
    machine = recorded_machine("efa").write("sys/devices/pci0000:10/0000:10:1b.0/current_link_speed", speed)
    assert pcie.rate_bytes(machine.host.tree, ["sys/devices/pci0000:10/0000:10:1b.0"]) == pcie.DEFAULT_RATE_BYTES
    assert pcie.rate_bytes(Tree("/nothing"), []) == pcie.DEFAULT_RATE_BYTES == pytest.approx(16 * GEN3_LANE)
