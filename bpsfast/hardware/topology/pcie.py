"""Where a device hangs on PCIe, which of the bridges above it are switches, and how fast each link is.

The kernel's path of a device names every bridge above it: ``/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/
0000:17:04.0/0000:1b:00.0`` is a host bridge, its root port, a switch's upstream port, one of its downstream ports, and
the device. A switch is a bridge below a root port with two ways down to devices of ours: that is its upstream port.
Bridges with one way down (ports, bridges on the card itself, switches that carry one device) are part of a link.

Not done: switches of Broadcom that show themselves as two levels are not flattened, as NCCL does by device ids.

References
----------
NCCL, ``src/graph/xml.cc`` (`ncclTopoGetXmlFromSys`) and ``topo.cc``; hwloc, ``hwloc/pci-common.c``.
"""
from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..interfaces import PcieLink, pcie_link
from ..sysfs import Tree

DEVICES = "sys/bus/pci/devices"
#: Bytes/s where the kernel tells no rate, as in virtual machines: PCIe 3 with 16 lanes, which NCCL takes as well.
DEFAULT_RATE_BYTES = float(round(8e9 * 16 * 128 / 130 / 8))

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class PcieLocation:
    """Where a device is: paths below the tree's root of all bridges from the root port down to it, its own the last."""

    folders: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The device's own folder."""
        return self.folders[-1]

    @property
    def address(self) -> str:
        """The device's address ("0000:3b:00.0")."""
        return os.path.basename(self.folder)

    @property
    def slot(self) -> str:
        """The folder without the function: what all functions of a card have in common."""
        return self.folder.rpartition(".")[0]


@dataclass(frozen=True)
class PcieBranch:
    """A switch, or a device in *slot* (then `below` is empty): its link upward runs over the bridges `way`."""

    slot: str
    way: tuple[str, ...]
    below: tuple[PcieBranch, ...] = ()

    @property
    def leaves(self) -> Iterator[str]:
        """The slots of all devices below it, or its own."""
        if not self.below:
            yield self.slot
        for hub in self.below:
            yield from hub.leaves


def locate(tree: Tree, *parts: str) -> PcieLocation | None:
    """Return where the device is that a link points to, None if it is not on PCIe.

    A device on another bus that begins at a PCI device (USB) is not; virtio's is, for its card is all that it has.
    """
    root = os.path.realpath(tree.root)
    path = os.path.relpath(os.path.realpath(tree.path(*parts)), root)
    words = path.split(os.sep)
    number = next((number for number, word in enumerate(words) if _HOST_BRIDGE.fullmatch(word)), None)
    if number is None or not tree.exists(path):
        return None
    if len(words) > number + 1 and re.fullmatch(r"virtio\d+", words[-1]):
        words.pop()
    bridges = words[number + 1:]
    if not bridges or not all(map(_ADDRESS.fullmatch, bridges)):
        return None
    return PcieLocation(tuple("/".join(words[:number + 2 + depth]) for depth in range(len(bridges))))


def branches(places: Iterable[PcieLocation]) -> list[PcieBranch]:
    """Return what hangs at root complexes: switches with all below them, and devices, in the order of *places*."""
    return _below([(each.folders, each.slot) for each in places], 0)


def _below(places: list[tuple[tuple[str, ...], str]], depth: int) -> list[PcieBranch]:
    """Return the hubs of *places*, whose first *depth* folders are the same."""
    ways: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for folders, slot in places:
        ways.setdefault(slot if len(folders) == depth + 1 else folders[depth], []).append((folders, slot))
    found = []
    for way in ways.values():
        folders, slot = way[0]
        if len({slot for _, slot in way}) == 1:
            found.append(PcieBranch(slot, folders[depth:]))
            continue
        branches = _below(way, depth + 1)
        if len(branches) > 1 and depth > 0:
            found.append(PcieBranch(folders[depth], (folders[depth],), tuple(branches)))
        else:  # a root port, or a bridge above the only way down
            found += [dataclasses.replace(hub, way=(folders[depth], *hub.way)) for hub in branches]
    return found


def rate_bytes(tree: Tree, way: Iterable[str], sleeps: bool = False) -> float:
    """Return bytes/s per direction of the slowest link of *way*, before the overhead of packets (10 to 20 %).

    *sleeps*: below is a GPU, which lets its link run slowly while it has nothing to do (2.5 GT/s): then what counts is
    the best speed that both ends can have, on the lanes that are there.
    """
    links = [link for folder in way if (link := pcie_link(tree, folder)) is not None]
    rates = [(_at_full_speed(link) if sleeps else link).gbps * 1e9 / 8 for link in links]
    return float(round(min(rates, default=DEFAULT_RATE_BYTES)))


def _at_full_speed(link: PcieLink) -> PcieLink:
    return dataclasses.replace(link, speed=max(link.speed, link.max_speed))
