"""RDMA devices, their ports and their GID tables, read from ``/sys/class/infiniband``.

The GIDs of a port are the addresses under which it can be reached. A RoCE packet has a GID of the sender's table as its
IP address. Each row belongs to one network interface and one version: RoCE v1 is not IP and does not pass routers; RoCE
v2 is UDP over the interface's IP address. A row with a link-local address reaches only the same link. Rows and their
numbers differ between machines and change with every address, so a row is chosen by its content, not by its number.

References
----------
Kernel, ``Documentation/ABI/stable/sysfs-class-infiniband``; rdma-core's ``ibv_devinfo`` and NVIDIA's ``ibdev2netdev``;
InfiniBand specification, annexes A16 and A17 (RoCE, RoCE v2).
"""
from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..base.value_formats import PATH_MTUS
from .interfaces import PcieLink, pcie_link
from .kernel import Address, Route
from .sysfs import Tree

_CLASS = "sys/class/infiniband"
_VERBS = "sys/class/infiniband_verbs"
#: Most bytes of headers in a RoCE packet; the kernel's iboe_get_mtu subtracts the same (GRH 40,
#: UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4).
ROCE_OVERHEAD_NBYTES = 96
#: The bit of a partition key that makes its port a full member of the partition, which the other bits number. Limited
#: members do not talk to each other.
_PKEY_FULL = 0x8000


@dataclass(frozen=True)
class Port:
    """One port. `state` such as "ACTIVE"; `phys_state` such as "LinkUp"; `netdev`: the interface on the same wire."""

    number: int
    state: str
    phys_state: str
    link_layer: str
    rate_gbps: float | None
    lid: int
    sm_lid: int
    netdev: str | None

    @property
    def is_active(self) -> bool:
        """Whether the port can send and receive."""
        return self.state == "ACTIVE"

    @property
    def is_roce(self) -> bool:
        """Whether the link is Ethernet."""
        return self.link_layer == "Ethernet"


@dataclass(frozen=True)
class RdmaDevice:
    """One RDMA device. `kind` is the kernel's node type: "CA", "RNIC" (iWARP), "unspecified" (EFA)..."""

    name: str
    kind: str
    driver: str
    firmware: str
    numa_node: int | None
    local_cpus: str
    pcie: PcieLink | None
    #: the device file below /dev/infiniband ("uverbs0"); None if there is none
    uverbs: str | None
    ports: tuple[Port, ...]


def rdma_devices(tree: Tree) -> list[RdmaDevice]:
    """Return all RDMA devices of the machine in natural order (mlx5_2 before mlx5_10)."""
    nodes = {tree.text(_VERBS, name, "ibdev"): name for name in tree.names(_VERBS) if name.startswith("uverbs")}
    return [_device(tree, name, nodes.get(name)) for name in tree.names(_CLASS)]


def roce_mtu(mtu: int) -> int:
    """Return the largest RoCE path MTU that fits an interface's *mtu* (bytes), 0 if none fits."""
    return next((each for each in PATH_MTUS if each + ROCE_OVERHEAD_NBYTES <= mtu), 0)


def _device(tree: Tree, name: str, uverbs: str | None) -> RdmaDevice:
    folder = f"{_CLASS}/{name}"
    numbers = [int(each) for each in tree.names(folder, "ports") if each.isdecimal()]
    return RdmaDevice(
        name=name,
        kind=_word(tree.text(folder, "node_type")),
        driver=_driver(tree, folder),
        firmware=tree.text(folder, "fw_ver") or "",
        numa_node=tree.numa_node(folder, "device"),
        local_cpus=tree.text(folder, "device", "local_cpulist") or "",
        pcie=pcie_link(tree, f"{folder}/device"),
        uverbs=uverbs,
        ports=tuple(_port(tree, folder, number) for number in numbers),
    )


def _driver(tree: Tree, folder: str) -> str:
    """Return the kernel driver of the card, or for a software device the one that its description names."""
    own = tree.target(folder, "device", "driver")
    if own:
        return own
    description = (tree.text(folder, "node_desc") or "").lower()
    return "rxe" if description == "rxe" else "siw" if "siw" in description or "iwarp" in description else "unknown"


def _port(tree: Tree, device: str, number: int) -> Port:
    folder = f"{device}/ports/{number}"
    rate = re.match(r"[\d.]+", tree.text(folder, "rate") or "")  # "100 Gb/sec (4X EDR)"
    return Port(
        number=number,
        state=_word(tree.text(folder, "state")),
        phys_state=_word(tree.text(folder, "phys_state")),
        link_layer=tree.text(folder, "link_layer") or "unknown",
        rate_gbps=float(rate[0]) if rate else None,
        lid=tree.number(folder, "lid") or 0,
        sm_lid=tree.number(folder, "sm_lid") or 0,
        netdev=_netdev(tree, device, number),
    )


def _netdev(tree: Tree, device: str, number: int) -> str | None:
    """Return the interface of a port: on RoCE from the GID table, else the card's interface with the port's number.

    Interfaces have their port, counted from 0, in dev_port (older drivers: dev_id).
    """
    found = tree.text(device, f"ports/{number}/gid_attrs/ndevs/0") or tree.text(device, "parent")
    if found:
        return found
    for name in tree.names(device, "device/net"):
        place = [tree.number(device, "device/net", name, each) or 0 for each in ("dev_port", "dev_id")]
        if max(place) == number - 1:
            return name
    return None


def _word(text: str | None) -> str:
    """Return the word of a state such as "4: ACTIVE"."""
    return (text or "unknown").partition(": ")[2] or text or "unknown"


@dataclass(frozen=True)
class Gid:
    """One used row of a GID table. `version` is "v1", "v2" or, on InfiniBand, "IB"."""

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


def gid_table(tree: Tree, device: str, port: int, link_layer: str) -> list[Gid]:
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


def pkey_table(tree: Tree, device: str, port: int) -> dict[int, int]:
    """Return the used rows of one port's table of partition keys, by index."""
    folder = f"{_CLASS}/{device}/ports/{port}"
    found = {}
    for name in sorted(tree.names(folder, "pkeys"), key=int):
        with contextlib.suppress(ValueError):
            key = int(tree.text(folder, "pkeys", name) or "0", 16)
            if key & ~_PKEY_FULL:
                found[int(name)] = key
    return found


def pkey_index(table: Mapping[int, int], wanted: int) -> int | None:
    """Return the row of *table* with the partition key *wanted* (0: the first row), or with its other membership.

    None if the port is not in that partition.
    """
    if not wanted:
        return 0
    return next((index for index, key in table.items() if key == wanted),
                next((index for index, key in table.items() if _is_same_partition(key, wanted)), None))


def can_talk(pkey: int, peer_pkey: int) -> bool:
    """Whether ports that use these partition keys accept each other's packets; 0: not known, so assumed."""
    if not pkey or not peer_pkey:
        return True
    return _is_same_partition(pkey, peer_pkey) and bool((pkey | peer_pkey) & _PKEY_FULL)


def _is_same_partition(one: int, other: int) -> bool:
    return one | _PKEY_FULL == other | _PKEY_FULL


def best_gid(rows: Sequence[Gid], route: Route | None = None) -> Gid | None:
    """Return the best row for the peer of *route*, or in general without a route. None if the table is empty.

    Preferred, in this order: RoCE v2; the route's source address; the route's interface; an address that passes
    routers; the peer's IP version (without a peer IPv4, which administrators assign); the lowest index.
    """
    return min(rows, key=lambda row: _gid_rank(row, route), default=None)


def _gid_rank(row: Gid, route: Route | None) -> tuple[bool, bool, bool, bool, bool, int]:
    source = route.source if route else None
    version = route.destination.version if route else 4
    # of IPv6 addresses only link-local ones do not pass routers
    return (row.version == "v1", route is not None and row.address != source,
            route is not None and row.netdev != route.netdev, row.is_link_local,
            row.address.version != version, row.index)
