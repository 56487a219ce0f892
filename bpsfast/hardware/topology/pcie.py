"""PCIe: the location of a device, which bridges above it are switches, and the rate of each link.

The kernel's path of a device names every bridge above it: ``/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/
0000:17:04.0/0000:1b:00.0`` is a host bridge, its root port, a switch's upstream port, one of its downstream ports, and
the device. A bridge below a root port with at least two branches to known devices is a switch (its upstream port).
Bridges with one branch (ports, bridges on the card itself, switches with one device) are part of a link.

Broadcom's switches that appear as two levels are not merged into one; NCCL does that by device ids.

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

from ..interfaces import pcie_link
from ..sysfs import Tree

DEVICES = "sys/bus/pci/devices"
#: Bytes/s if the kernel reports no rate, as in virtual machines: PCIe 3 with 16 lanes, as in NCCL.
DEFAULT_RATE_BYTES = float(round(8e9 * 16 * 128 / 130 / 8))

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class PcieLocation:
    """The location of a device: the folders of all bridges from the root port down to it, its own as the last."""

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
        """The folder without the PCI function: the same for all functions of a card."""
        return self.folder.rpartition(".")[0]


@dataclass(frozen=True)
class PcieBranch:
    """A switch, or a device in *slot* without branches `below`; its upward link consists of the bridges `bridges`."""

    slot: str
    bridges: tuple[str, ...]
    below: tuple[PcieBranch, ...] = ()

    @property
    def leaves(self) -> Iterator[str]:
        """The slots of all devices below, or its own slot."""
        if not self.below:
            yield self.slot
        for branch in self.below:
            yield from branch.leaves


def locate(tree: Tree, *parts: str) -> PcieLocation | None:
    """Return the location of the device that a symbolic link points to, None if it is not on PCIe.

    A device on another bus below a PCI device (USB) is not on PCIe; a virtio device is, as its card's only device.
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
    """Return the switches and devices at root complexes, with all branches below, in the order of *places*."""
    return _below([(each.folders, each.slot) for each in places], 0)


def _below(places: list[tuple[tuple[str, ...], str]], depth: int) -> list[PcieBranch]:
    """Return the branches of *places*, whose first *depth* folders are the same."""
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
        else:  # a root port, or a bridge with one branch
            found += [dataclasses.replace(branch, bridges=(folders[depth], *branch.bridges)) for branch in branches]
    return found


def rate_bytes(tree: Tree, bridges: Iterable[str], sleeps: bool = False) -> float:
    """Return bytes/s per direction of the slowest link of *bridges*, before the overhead of packets (10 to 20 %).

    *sleeps*: the device is a GPU, which slows its link while idle (2.5 GT/s); then the largest speed of both ends
    counts, with the present number of lanes.
    """
    links = [link for folder in bridges if (link := pcie_link(tree, folder)) is not None]
    if sleeps:
        links = [dataclasses.replace(link, speed=max(link.speed, link.max_speed)) for link in links]
    return float(round(min((link.gbps * 1e9 / 8 for link in links), default=DEFAULT_RATE_BYTES)))
