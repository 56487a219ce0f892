"""The GID table: under which addresses an RDMA port can be reached, and which row to use.

RoCE packets carry a GID of the sender's table as their IP address. Each row belongs to a network interface and a
version: RoCE v1 does not pass routers (and is no IP at all), RoCE v2 is UDP over the interface's own IP address. A
row with a link-local address only reaches the same wire. The rows and their numbers differ between machines and
change whenever an address does, hence: choose by content, not by number.

References
----------
InfiniBand specification, annexes A16 and A17 (RoCE, RoCE v2).
Kernel, ``Documentation/ABI/stable/sysfs-class-infiniband``.
"""
from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from .netlink import Address, Route
from .sysfs import Tree

_CLASS = "sys/class/infiniband"


@dataclass(frozen=True)
class Gid:
    """One row that is in use. `version` is "v1", "v2" or, on InfiniBand, "IB"."""

    device: str
    port: int
    index: int
    value: bytes
    version: str
    netdev: str | None = None

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """The IPv4 address that is mapped into the GID, if one is."""
        return ipaddress.IPv6Address(self.value).ipv4_mapped

    @property
    def address(self) -> Address:
        """The GID as an IP address."""
        return self.ipv4 or ipaddress.IPv6Address(self.value)

    @property
    def is_link_local(self) -> bool:
        """Whether it reaches the same wire only (fe80::)."""
        return self.address.is_link_local

    @property
    def text(self) -> str:
        """The GID as /sys and show_gids print it: eight groups of four digits."""
        return ipaddress.IPv6Address(self.value).exploded


def table(tree: Tree, device: str, port: int, link_layer: str) -> list[Gid]:
    """Return the rows in use of one port's table, by index."""
    folder = f"{_CLASS}/{device}/ports/{port}"
    rows = []
    for name in tree.names(folder, "gids"):
        text = tree.text(folder, "gids", name)
        if not text or not text.replace("0", "").replace(":", ""):
            continue
        try:
            value = ipaddress.IPv6Address(text).packed
        except ValueError:
            continue
        kind = tree.text(folder, "gid_attrs/types", name) or ""
        version = "v2" if "v2" in kind else "v1" if link_layer == "Ethernet" else "IB"
        rows.append(Gid(device, port, int(name), value, version, tree.text(folder, "gid_attrs/ndevs", name)))
    return rows


def best(rows: Sequence[Gid], route: Route | None = None) -> Gid | None:
    """Return the row to use: towards the peer that *route* leads to, or in general. None if the table is empty.

    In order: RoCE v2; the very address that the route leaves from; the route's interface; an address that passes
    routers; the peer's IP version (in general IPv4, as its addresses are chosen rather than made up by the kernel);
    the lowest index.
    """
    return min(rows, key=lambda row: _rank(row, route), default=None)


def _rank(row: Gid, route: Route | None) -> tuple[bool, bool, bool, bool, bool, int]:
    source = route.source if route else None
    version = route.destination.version if route else 4
    # a temporary or site-local IPv6 address passes routers as well: only link-local ones do not
    return (row.version == "v1", route is not None and row.address != source,
            route is not None and row.netdev != route.netdev, row.is_link_local,
            row.address.version != version, row.index)
