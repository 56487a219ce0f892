"""Network cards: which functions on PCIe are one card, and what goes through its wires.

Functions in one slot share the slot's PCIe link: they are one card, its wires added up, as NCCL has it (``xml.cc``). A
virtual function counts where its card cannot be seen (in a guest) or used (in a container that was given the function
alone); else the card's own functions tell all.
"""
from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .. import interfaces
from ..host import Host
from ..rdma_devices import RdmaDevice
from .pcie import PcieLocation, place

_log = logging.getLogger("bpsfast.hardware.topology")


@dataclass
class NetworkCard:
    """One card. `devices`: its RDMA devices and the interfaces without one; `rate_bytes`: 0 if nobody knows. `wires`:
    the functions whose wires virtual ones have brought in.
    """

    place: PcieLocation
    model: str
    devices: list[str] = field(default_factory=list)
    rate_bytes: float = 0.0
    wires: set[PcieLocation] = field(default_factory=set)


def cards(host: Host) -> list[NetworkCard]:
    """Return the cards with a wire that is plugged in, by address; others are named in the log."""
    found: dict[str, NetworkCard] = {}
    counted = set()
    folders = [*(("sys/class/infiniband", device.name) for device in host.devices),
               *((interfaces.FOLDER, name) for name in host.netdevs)]
    shown = {place(host.tree, *folder, "device") for folder in folders}  # also those whose wire is not up
    for device in host.devices:
        own = place(host.tree, "sys/class/infiniband", device.name, "device")
        model = host.tree.text("sys/class/infiniband", device.name, "hca_type") or device.driver
        if own is not None:
            counted.add(own)
            _add(host, found, shown, own, device.name, model, _rdma_rate(device))
    for netdev in host.netdevs.values():
        own = place(host.tree, interfaces.FOLDER, netdev.name, "device")
        if own is not None and own not in counted:
            rate = (netdev.speed_mbps or 0) * 1e6 / 8 if netdev.state != "down" else None
            _add(host, found, shown, own, netdev.name, netdev.driver or "", rate)
    return sorted(found.values(), key=lambda card: card.place.address)


def _rdma_rate(device: RdmaDevice) -> float | None:
    """Return bytes/s of the ports that are up, None if none is."""
    up = [port for port in device.ports if port.is_active]
    return sum(port.rate_gbps or 0.0 for port in up) * 1e9 / 8 if up else None


def _add(host: Host, found: dict[str, NetworkCard], shown: set[PcieLocation | None], own: PcieLocation, name: str, model: str,
         rate: float | None) -> None:
    """Put the device *name* to its card, unless *rate* is None: not plugged in. *shown*: the places of all devices."""
    real = place(host.tree, own.folder, "physfn")
    if real is not None and real in shown:
        return
    if rate is None:
        _log.info("%s is left out of the machine's graph: its wire is not up", name)
        return
    card = found.setdefault((real or own).slot, NetworkCard(own, model))
    card.devices.append(name)
    if real is None or real not in card.wires:  # virtual functions of one share its wire
        card.rate_bytes += rate
    if real is not None:
        card.wires.add(real)
