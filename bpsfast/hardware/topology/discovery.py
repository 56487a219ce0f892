"""The graph of this machine, or of a recorded one: from the kernel's files, and from NVML where there are GPUs.

What cannot be found out is left out or has a default, named where it stands: a container without ``/sys`` is one
socket, a virtual machine has its GPUs and cards directly at a socket. Nothing is measured.

References
----------
NCCL, ``src/graph/topo.cc`` and ``xml.cc``; BytePS (OSDI'20), section 4.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .. import recorded_host
from ..host import Host
from ..sysfs import Tree
from . import nvml
from .graph import Link, LinkKind, Part, PartKind, Topology
from .network_cards import cards
from .pcie import DEFAULT_RATE_BYTES, DEVICES, PcieBranch, PcieLocation, hubs, place, rate_bytes
from .sockets import Sockets

_NVIDIA, _AMD = 0x10de, 0x1002
#: PCI classes: display controllers (VGA, 3D, other), and what AMD's MI300 calls itself
_DISPLAY, _ACCELERATOR = 0x03, 0x12


class _Device(NamedTuple):
    """A GPU or a card, and where it is."""

    part: Part
    place: PcieLocation


def discover(root: str | None = None) -> Topology:
    """Return the graph of this machine, or of the one recorded below *root*.

    Raises
    ------
    ConfigError
        *root* is no folder, or its answers.json is not what `recorded.KernelAnswers` and `nvml.NvmlAnswer` describe.
    """
    host = recorded_host.host(root)
    if isinstance(host.kernel, recorded_host.RecordedKernel):
        return machine(host, nvml.recorded(host.kernel.answers.nvml))
    return machine(host, nvml.examine())


def machine(host: Host, answer: nvml.NvmlAnswer) -> Topology:
    """Return the graph of *host*, of which NVML has given *answer*."""
    sockets = Sockets(host)
    gpus, nics = _gpus(host.tree, answer), _cards(host)
    names = {device.part.address: device.part.name for device in gpus}
    # GPUs that only NVML knows: a container without /sys
    lost = [_gpu(f"gpu{number}", gpu.address, gpu)
            for number, gpu in enumerate((gpu for gpu in answer.gpus if gpu.address not in names), len(gpus))]
    names |= {part.address: part.name for part in lost}
    switches, links = _pcie(host.tree, gpus + nics, sockets)
    links += [Link(sockets.parts[0].name, part.name, LinkKind.PCIE, DEFAULT_RATE_BYTES) for part in lost]
    nvswitches, nvlinks = nvml.nvlinks(answer, names)
    return Topology(
        host.tree.text("proc/sys/kernel/hostname") or "this machine",
        (*sockets.parts, *switches, *(gpu.part for gpu in gpus), *lost, *(nic.part for nic in nics), *nvswitches),
        (*sockets.links, *links, *nvlinks))


def _gpus(tree: Tree, answer: nvml.NvmlAnswer) -> list[_Device]:
    """Return the GPUs by address, which is NVML's order, too. Of NVIDIA's only those that NVML lists, if it does.

    A container sees all GPUs of its machine in /sys, and may use those that it was given.
    """
    listed = {gpu.address: gpu for gpu in answer.gpus}
    found: list[_Device] = []
    for address in sorted(tree.names(DEVICES)):
        vendor, kind = (tree.number(DEVICES, address, name) or 0 for name in ("vendor", "class"))
        is_gpu = (kind >> 16 == _DISPLAY and vendor in (_NVIDIA, _AMD)) or (kind >> 16 == _ACCELERATOR
                                                                            and vendor == _AMD)
        where = place(tree, DEVICES, address) if is_gpu else None
        if where is None or (listed and vendor == _NVIDIA and address not in listed):
            continue
        model = f"{vendor:04x}:{tree.number(DEVICES, address, 'device') or 0:04x}"
        found.append(_Device(_gpu(f"gpu{len(found)}", address, listed.get(address), model), where))
    return found


def _gpu(name: str, address: str, told: nvml.Gpu | None, model: str = "") -> Part:
    return Part(name, PartKind.GPU, address, told.name if told else model, device=str(told.index) if told else "")


def _cards(host: Host) -> list[_Device]:
    return [_Device(Part(f"nic{number}", PartKind.NIC, card.place.address, card.model, wire_rate_bytes=card.rate_bytes,
                         device=",".join(card.devices)), card.place) for number, card in enumerate(cards(host))]


def _pcie(tree: Tree, devices: list[_Device], sockets: Sockets) -> tuple[list[Part], list[Link]]:
    """Return the switches above *devices*, and the links of both upward."""
    by_slot: dict[str, list[_Device]] = {}
    for device in devices:
        by_slot.setdefault(device.place.slot, []).append(device)
    switches: list[Part] = []
    links: list[Link] = []

    def hang(hub: PcieBranch, above: str) -> None:
        parts = [device.part for device in by_slot[hub.slot]] if not hub.below else [Part(
            f"switch{len(switches)}", PartKind.SWITCH, hub.slot.rpartition("/")[2], _model(tree, hub.slot))]
        rate = rate_bytes(tree, hub.way, sleeps=any(part.kind is PartKind.GPU for part in parts))
        links.extend(Link(above, part.name, LinkKind.PCIE, rate) for part in parts)
        if hub.below:
            switches.extend(parts)
        for below in hub.below:
            hang(below, parts[0].name)

    for hub in hubs(sorted((device.place for device in devices), key=lambda each: each.folders)):
        hang(hub, sockets.of(_numa_node(tree, hub, by_slot)))
    return switches, links


def _model(tree: Tree, folder: str) -> str:
    """Return a device's vendor and model as ``lspci -n`` writes them."""
    vendor, model = (tree.number(folder, name) for name in ("vendor", "device"))
    return "" if vendor is None or model is None else f"{vendor:04x}:{model:04x}"


def _numa_node(tree: Tree, hub: PcieBranch, by_slot: Mapping[str, list[_Device]]) -> int | None:
    """Return the NUMA node that one of the devices below *hub* names, None if none does."""
    told = (tree.number(device.place.folder, "numa_node") for slot in hub.leaves for device in by_slot[slot])
    return next((node for node in told if node is not None and node >= 0), None)
