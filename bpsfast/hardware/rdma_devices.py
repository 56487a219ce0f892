"""RDMA devices and their ports, read from ``/sys/class/infiniband``.

References
----------
Kernel, ``Documentation/ABI/stable/sysfs-class-infiniband``; rdma-core's ``ibv_devinfo`` and NVIDIA's ``ibdev2netdev``.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

from ..base.value_formats import PATH_MTUS
from .interfaces import PcieLink, pcie_link
from .sysfs import Tree

_CLASS = "sys/class/infiniband"
_VERBS = "sys/class/infiniband_verbs"
#: Most bytes of headers in a RoCE packet; the kernel's iboe_get_mtu subtracts the same (GRH 40,
#: UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4).
ROCE_OVERHEAD_NBYTES = 96


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
    numa = tree.number(folder, "device", "numa_node")
    numbers = [int(each) for each in tree.names(folder, "ports") if each.isdecimal()]
    return RdmaDevice(
        name=name,
        kind=_word(tree.text(folder, "node_type")),
        driver=_driver(tree, folder),
        firmware=tree.text(folder, "fw_ver") or "",
        numa_node=numa if numa is not None and numa >= 0 else None,
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
