"""The GID table and which row is best."""
from __future__ import annotations

import ipaddress
from collections.abc import Callable

import pytest

from bpsfast.hardware import rdma_devices
from bpsfast.hardware.kernel import Route
from bpsfast.hardware.rdma_devices import Gid
from tests.sysfs_trees.machine import Machine


def row(index: int, address: str, version: str = "v2", netdev: str = "eth2") -> Gid:
    ip = ipaddress.ip_address(address)
    value = ipaddress.IPv6Address(f"::ffff:{ip}").packed if ip.version == 4 else ip.packed
    return Gid("d", 1, index, value, version, netdev)


def route(destination: str, source: str, netdev: str = "eth2") -> Route:
    return Route(ipaddress.ip_address(destination), netdev, ipaddress.ip_address(source))


def test_rows_in_use_with_version_address_and_interface(recorded_machine: Callable[[str], Machine]) -> None:
    host = recorded_machine("mlx5_roce").host
    device, port = host.ports[0]
    rows = host.gids(device.name, port)
    assert [(each.index, each.version, str(each.address), each.netdev, each.is_link_local) for each in rows] == [
        (0, "v1", "fe80::bace:f6ff:fea1:7c", "eth2", True), (1, "v2", "fe80::bace:f6ff:fea1:7c", "eth2", True),
        (2, "v1", "10.1.0.7", "eth2", False), (3, "v2", "10.1.0.7", "eth2", False)]
    assert rows[3].text == "0000:0000:0000:0000:0000:ffff:0a01:0007" and str(rows[3].ipv4) == "10.1.0.7"


def test_an_infiniband_row_has_no_interface(recorded_machine: Callable[[str], Machine]) -> None:
    host = recorded_machine("infiniband").host
    device, port = host.ports[0]
    [only] = host.gids(device.name, port)
    assert only.version == "IB" and only.netdev is None and only.ipv4 is None


def test_a_row_that_is_no_address_is_left_out(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("rxe").write("sys/class/infiniband/rxe0/ports/1/gids/0", "what is this")
    device, port = machine.host.ports[0]
    assert [each.index for each in machine.host.gids(device.name, port)] == [1]


V1, LOCAL, V4, V6 = row(0, "10.1.0.7", "v1"), row(1, "fe80::1"), row(3, "10.1.0.7"), row(4, "2001:db8::7")
OTHER, SECOND = row(5, "10.9.0.7", netdev="eth2.100"), row(6, "10.1.0.77")


@pytest.mark.parametrize(("rows", "path", "best"), [
    ([V1, LOCAL, V4, V6], None, V4),  # RoCE v2, routable, IPv4
    ([V6, V4], None, V4), ([V4, SECOND], None, V4), ([SECOND, V4], None, V4),  # the lowest number of equals
    ([V1, LOCAL], None, LOCAL), ([V1], None, V1), ([], None, None),
    ([V4, V6], route("2001:db8::8", "2001:db8::7"), V6),  # the address that the route leaves from
    ([V4, SECOND], route("10.1.0.8", "10.1.0.77"), SECOND),
    ([V4, OTHER], route("10.9.0.8", "10.9.0.7", "eth2.100"), OTHER),
    ([V1, OTHER], route("10.1.0.8", "10.1.0.7"), OTHER),  # never v1 while there is v2
    ([LOCAL, V4], route("fe80::2", "fe80::1"), LOCAL),
    ([OTHER, V4], route("10.5.0.8", "10.5.0.7", "eth2"), V4),  # the route's interface, if not its address
])
def test_the_best_row(rows: list[Gid], path: Route | None, best: Gid | None) -> None:
    assert rdma_devices.best_gid(rows, path) == best
