"""The GID table of an RDMA port: the addresses under which it can be reached, and which row to use.

A RoCE packet has a GID of the sender's table as its IP address. Each row belongs to one network interface and one
version: RoCE v1 is not IP and does not pass routers; RoCE v2 is UDP over the interface's IP address. A row with a
link-local address reaches only the same link. Rows and their numbers differ between machines and change with every
address, so a row is chosen by its content, not by its number.

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
    """One used row. `version` is "v1", "v2" or, on InfiniBand, "IB"."""

    device: str
    port: int
    index: int
    value: bytes
    version: str
    netdev: str | None = None

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """The IPv4 address in the GID, None if it is an IPv6 address."""
        return ipaddress.IPv6Address(self.value).ipv4_mapped

    @property
    def address(self) -> Address:
        """The GID as an IP address."""
        return self.ipv4 or ipaddress.IPv6Address(self.value)

    @property
    def is_link_local(self) -> bool:
        """Whether it reaches only the same link (fe80::)."""
        return self.address.is_link_local

    @property
    def text(self) -> str:
        """The GID as sysfs and show_gids print it: eight groups of four digits."""
        return ipaddress.IPv6Address(self.value).exploded


def table(tree: Tree, device: str, port: int, link_layer: str) -> list[Gid]:
    """Return the used rows of one port's table, by index."""
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
    """Return the best row for the peer of *route*, or in general without a route. None if the table is empty.

    Preferred, in this order: RoCE v2; the route's source address; the route's interface; an address that passes
    routers; the peer's IP version (without a peer IPv4, which administrators assign); the lowest index.
    """
    return min(rows, key=lambda row: _rank(row, route), default=None)


def _rank(row: Gid, route: Route | None) -> tuple[bool, bool, bool, bool, bool, int]:
    source = route.source if route else None
    version = route.destination.version if route else 4
    # of IPv6 addresses only link-local ones do not pass routers
    return (row.version == "v1", route is not None and row.address != source,
            route is not None and row.netdev != route.netdev, row.is_link_local,
            row.address.version != version, row.index)
