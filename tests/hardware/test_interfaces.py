"""Network interfaces and the PCIe link behind them."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.hardware.interfaces import PcieLink
from tests.sysfs_trees.machine import Machine


def test_an_interface_of_a_card(recorded_machine: Callable[[str], Machine]) -> None:
    found = recorded_machine("mlx5_roce").host.netdevs["eth3"]
    assert (found.mtu, found.state, found.speed_mbps, found.driver) == (1500, "up", 100000, "mlx5_core")
    assert (found.numa_node, found.n_rx_queues, found.is_card) == (1, 8, True)
    assert found.pcie is not None and found.pcie.degraded and list(map(str, found.ips)) == ["10.2.0.7"]


def test_what_is_no_card_or_unknown_is_none(recorded_machine: Callable[[str], Machine]) -> None:
    netdevs = recorded_machine("rxe").host.netdevs
    assert not netdevs["br0"].is_card and netdevs["lo"].ips == () and netdevs["roce0"].speed_mbps == 10000
    assert recorded_machine("efa").host.netdevs["ens32"].speed_mbps is None


def test_a_file_among_the_interfaces_is_none(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("none").write("sys/class/net/bonding_masters", "bond0")
    assert set(machine.host.netdevs) == {"eth0", "lo"}


def test_bonds_and_vlans_know_their_card(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("mlx5_roce")
    machine.write("sys/class/net/eth2.100/ifindex", "9").write("sys/class/net/eth2.100/lower_eth2/ifindex", "4")
    (machine.root / "sys/class/net/eth3/master").symlink_to("../bond0")
    host = machine.host
    assert host.family("eth2.100") == {"eth2.100", "eth2"} and host.family("eth3") == {"eth3", "bond0"}
    assert host.family("nothing") == {"nothing"}


# PCIe: 8b/10b up to 5 GT/s, 128b/130b up to 32 GT/s, flits of 242 in 256 bytes above
@pytest.mark.parametrize(("speed", "width", "gbps"), [
    (2.5, 1, 2.0), (5.0, 8, 32.0), (8.0, 8, 63.0), (16.0, 16, 252.1), (32.0, 16, 504.1), (64.0, 16, 968.0)])
def test_a_link_s_rate(speed: float, width: int, gbps: float) -> None:
    link = PcieLink("0000:3b:00.0", speed, width, 64.0, 16)
    assert link.gbps == pytest.approx(gbps, abs=0.1) and link.degraded == ((speed, width) != (64.0, 16))


@pytest.mark.parametrize(("width", "speed"), [("0", "16.0 GT/s"), ("255", "16.0 GT/s"), ("16", "Unknown"), ("", "")])
def test_a_virtual_card_has_no_link(width: str, speed: str, recorded_machine: Callable[[str], Machine]) -> None:
    place = "sys/devices/pci0000:3a/0000:3a:02.0/0000:3b:00.0"
    machine = recorded_machine("mlx5_roce").write(f"{place}/current_link_width", width)
    assert machine.write(f"{place}/current_link_speed", speed).host.netdevs["eth2"].pcie is None
