"""Discovers the topology of this machine, or of a recorded one, from the kernel's files and, for GPUs, from NVML.

Unknown facts are omitted or have defaults: a container without ``/sys`` is one socket; a virtual machine has its GPUs
and cards directly at a socket. Nothing is measured.

Network cards: functions in one slot share its PCIe link and are one card whose wires add up, as in NCCL (``xml.cc``). A
virtual function counts if its card cannot be seen (in a guest) or used (in a container with only that function).

Sockets: each NUMA node with cores is one, also if firmware divides a processor into several (NPS2, sub-NUMA clusters),
because each has its own memory. Nodes without cores (memory on CXL, a GPU's memory) are not sockets.

References
----------
NCCL, ``src/graph/topo.cc`` and ``xml.cc``; BytePS (OSDI'20), section 4.
"""
from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...base.value_formats import format_cpus, parse_cpus
from .. import interfaces, numa
from ..host import Host, RecordedKernel, open_host
from ..rdma_devices import RdmaDevice
from ..sysfs import Tree
from . import nvml
from .graph import Link, LinkKind, Part, PartKind, Topology
from .pcie import DEFAULT_RATE_BYTES, DEVICES, PcieBranch, PcieLocation, branches, locate, rate_bytes

_NVIDIA, _AMD = 0x10de, 0x1002
#: PCI classes: display controllers (VGA, 3D, other), and AMD's MI300
_DISPLAY, _ACCELERATOR = 0x03, 0x12


class _Device(NamedTuple):
    """A GPU or network card, and its location."""

    part: Part
    location: PcieLocation


def discover(root: str | None = None) -> Topology:
    """Return the graph of this machine, or of the one recorded below *root*.

    Raises `ConfigError` if *root* is not a folder, or its answers.json does not fit `KernelAnswers` and `NvmlAnswer`.
    """
    host = open_host(root)
    if isinstance(host.kernel, RecordedKernel):
        return machine(host, nvml.recorded_answer(host.kernel.answers.nvml))
    return machine(host, nvml.query_nvml())


def machine(host: Host, answer: nvml.NvmlAnswer) -> Topology:
    """Return the graph of *host* with NVML's *answer*."""
    sockets = Sockets(host)
    gpus = _gpus(host.tree, answer)
    nics = [_Device(Part(f"nic{number}", PartKind.NIC, card.location.address, card.model, device=",".join(card.devices),
                         wire_rate_bytes=card.rate_bytes), card.location) for number, card in enumerate(cards(host))]
    names = {device.part.address: device.part.name for device in gpus}
    # GPUs that only NVML reports: a container without /sys
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
    """Return the GPUs by address, which is also NVML's order; of NVIDIA's only those that NVML lists, if it lists any.

    A container sees all GPUs of its machine in /sys but may use only those that NVML lists.
    """
    listed = {gpu.address: gpu for gpu in answer.gpus}
    found: list[_Device] = []
    for address in sorted(tree.names(DEVICES)):
        vendor, kind = (tree.number(DEVICES, address, name) or 0 for name in ("vendor", "class"))
        is_gpu = (kind >> 16 == _DISPLAY and vendor in (_NVIDIA, _AMD)) or (kind >> 16 == _ACCELERATOR
                                                                            and vendor == _AMD)
        where = locate(tree, DEVICES, address) if is_gpu else None
        if where is None or (listed and vendor == _NVIDIA and address not in listed):
            continue
        model = f"{vendor:04x}:{tree.number(DEVICES, address, 'device') or 0:04x}"
        found.append(_Device(_gpu(f"gpu{len(found)}", address, listed.get(address), model), where))
    return found


def _gpu(name: str, address: str, told: nvml.Gpu | None, model: str = "") -> Part:
    return Part(name, PartKind.GPU, address, told.name if told else model, device=str(told.index) if told else "")


def _pcie(tree: Tree, devices: list[_Device], sockets: Sockets) -> tuple[list[Part], list[Link]]:
    """Return the switches above *devices*, and the upward links of both."""
    by_slot: dict[str, list[_Device]] = {}
    for device in devices:
        by_slot.setdefault(device.location.slot, []).append(device)
    switches: list[Part] = []
    links: list[Link] = []

    def add(branch: PcieBranch, above: str) -> None:
        parts = [device.part for device in by_slot[branch.slot]] if not branch.below else [Part(
            f"switch{len(switches)}", PartKind.SWITCH, branch.slot.rpartition("/")[2], _model(tree, branch.slot))]
        rate = rate_bytes(tree, branch.bridges, sleeps=any(part.kind is PartKind.GPU for part in parts))
        links.extend(Link(above, part.name, LinkKind.PCIE, rate) for part in parts)
        if branch.below:
            switches.extend(parts)
        for below in branch.below:
            add(below, parts[0].name)

    for branch in branches(sorted((device.location for device in devices), key=lambda each: each.folders)):
        add(branch, sockets.of(_numa_node(tree, branch, by_slot)))
    return switches, links


def _model(tree: Tree, folder: str) -> str:
    """Return a device's vendor and model in the form of ``lspci -n``."""
    vendor, model = (tree.number(folder, name) for name in ("vendor", "device"))
    return "" if vendor is None or model is None else f"{vendor:04x}:{model:04x}"


def _numa_node(tree: Tree, branch: PcieBranch, by_slot: Mapping[str, list[_Device]]) -> int | None:
    """Return the NUMA node of the first device below *branch* that has one, else None."""
    nodes = (tree.numa_node(device.location.folder) for slot in branch.leaves for device in by_slot[slot])
    return next((node for node in nodes if node is not None), None)


_log = logging.getLogger("bpsfast.hardware.topology")


@dataclass
class NetworkCard:
    """One network card. `devices`: its RDMA devices, and its interfaces without one. `rate_bytes`: 0 if unknown.

    `wires`: the physical functions whose wires virtual functions have added.
    """

    location: PcieLocation
    model: str
    devices: list[str] = field(default_factory=list)
    rate_bytes: float = 0.0
    wires: set[PcieLocation] = field(default_factory=set)


def cards(host: Host) -> list[NetworkCard]:
    """Return the cards whose wire is up, by address; the others are logged."""
    found: dict[str, NetworkCard] = {}
    counted = set()
    folders = [*(("sys/class/infiniband", device.name) for device in host.devices),
               *((interfaces.FOLDER, name) for name in host.netdevs)]
    shown = {locate(host.tree, *folder, "device") for folder in folders}  # including cards whose wire is down
    for device in host.devices:
        own = locate(host.tree, "sys/class/infiniband", device.name, "device")
        model = host.tree.text("sys/class/infiniband", device.name, "hca_type") or device.driver
        if own is not None:
            counted.add(own)
            _add(host, found, shown, own, device.name, model, _rdma_rate(device))
    for netdev in host.netdevs.values():
        own = locate(host.tree, interfaces.FOLDER, netdev.name, "device")
        if own is not None and own not in counted:
            rate = (netdev.speed_mbps or 0) * 1e6 / 8 if netdev.state != "down" else None
            _add(host, found, shown, own, netdev.name, netdev.driver or "", rate)
    return sorted(found.values(), key=lambda card: card.location.address)


def _rdma_rate(device: RdmaDevice) -> float | None:
    """Return bytes/s of the active ports, None if none is active."""
    up = [port for port in device.ports if port.is_active]
    return sum(port.rate_gbps or 0.0 for port in up) * 1e9 / 8 if up else None


def _add(host: Host, found: dict[str, NetworkCard], shown: set[PcieLocation | None], own: PcieLocation, name: str,
         model: str, rate: float | None) -> None:
    """Add the device *name* to its card, unless *rate* is None (wire down). *shown*: the locations of all devices."""
    real = locate(host.tree, own.folder, "physfn")
    if real is not None and real in shown:
        return
    if rate is None:
        _log.info("%s is left out of the machine's graph: its wire is not up", name)
        return
    card = found.setdefault((real or own).slot, NetworkCard(own, model))
    card.devices.append(name)
    if real is None or real not in card.wires:  # virtual functions of one card share its wire
        card.rate_bytes += rate
    if real is not None:
        card.wires.add(real)


#: (vendor, family, models) -> bytes/s per direction between two processors: links x transfers/s x bytes of payload.
#: Figures are the vendors' (product briefs, "QPI/UPI speed" in Intel's ARK, AMD's architecture overviews), all of a
#: usual board of two. NCCL's (topo.h: 6, 10, 22 GB/s...) are smaller, because they are for a GPU that reads another
#: one's memory through both processors, not for memory copies. The paper has "above 300 Gbit/s" for its Broadwell.
_SOCKET_RATES_BYTES = (
    ("GenuineIntel", 6, (45, 62), 2 * 8.0e9 * 2),  # Sandy Bridge, Ivy Bridge: two QPI
    ("GenuineIntel", 6, (63, 79), 2 * 9.6e9 * 2),  # Haswell, Broadwell: two QPI
    ("GenuineIntel", 6, (85,), 2 * 10.4e9 * 2),  # Skylake, Cascade Lake: two UPI (some boards have three)
    ("GenuineIntel", 6, (106,), 3 * 11.2e9 * 2),  # Ice Lake: three UPI
    ("GenuineIntel", 6, (143,), 3 * 16.0e9 * 2),  # Sapphire Rapids: three UPI (some boards have four)
    ("GenuineIntel", 6, (207,), 3 * 20.0e9 * 2),  # Emerald Rapids
    ("GenuineIntel", 6, (173,), 3 * 24.0e9 * 2),  # Granite Rapids
    ("AuthenticAMD", 23, (1,), 4 * 10.7e9 * 2),  # Naples: four xGMI, one for each pair of dies
    ("AuthenticAMD", 23, (49,), 3 * 18.0e9 * 2),  # Rome: three xGMI of 16 lanes (some boards have four)
    ("AuthenticAMD", 25, (1,), 3 * 18.0e9 * 2),  # Milan
    ("AuthenticAMD", 25, (17, 160), 3 * 32.0e9 * 2),  # Genoa, Bergamo
    ("AuthenticAMD", 26, (2, 17), 3 * 32.0e9 * 2),  # Turin
)
#: Between other processors: one UPI of the slowest kind.
_DEFAULT_RATE_BYTES = 10.4e9 * 2
#: Between NUMA nodes of one processor: a guess, above any PCIe link.
_SAME_SOCKET_RATE_BYTES = 100e9


@dataclass(frozen=True)
class Cpu:
    """The first core in /proc/cpuinfo; missing fields are empty or 0."""

    vendor: str = ""
    family: int = 0
    model: int = 0
    name: str = ""


def cpu(tree: Tree) -> Cpu:
    """Return the model of the processors, which is the same for all of a machine."""
    told = tree.fields("proc/cpuinfo")
    family, model = (int(told[key]) if told.get(key, "").isdecimal() else 0 for key in ("cpu family", "model"))
    return Cpu(told.get("vendor_id", ""), family, model, told.get("model name", ""))


def between_rate_bytes(kind: Cpu) -> float:
    """Return bytes/s per direction between two processors of *kind*."""
    return next((rate for vendor, family, models, rate in _SOCKET_RATES_BYTES
                 if vendor == kind.vendor and family == kind.family and kind.model in models), _DEFAULT_RATE_BYTES)


class Sockets:
    """The sockets of one machine, at least one: `parts`, their `links`, and which one a device belongs to."""

    def __init__(self, host: Host) -> None:
        self._nodes = {number: node for number, node in host.numa.items() if node.cpus}
        kind = cpu(host.tree)
        self.links: list[Link] = []
        if not self._nodes:  # a kernel without NUMA, or a container without /sys
            known = parse_cpus(host.tree.text("sys/devices/system/cpu/online") or "")
            cpus = format_cpus(known or numa.allowed_cpus(host.tree))
            self.parts = [Part("socket0", PartKind.SOCKET, model=kind.name, cpus=cpus)]
            return
        self.parts = [Part(f"socket{number}", PartKind.SOCKET, model=kind.name, cpus=format_cpus(node.cpus))
                      for number, node in self._nodes.items()]
        rate = between_rate_bytes(kind)
        for one, other in itertools.combinations(self._nodes.values(), 2):
            same = _package(host.tree, one) is not None and _package(host.tree, one) == _package(host.tree, other)
            self.links.append(Link(f"socket{one.number}", f"socket{other.number}", LinkKind.SOCKETS,
                                   _SAME_SOCKET_RATE_BYTES if same else rate))

    def of(self, node: int | None) -> str:
        """Return the socket of devices on the NUMA *node*: the first socket if firmware reports none (-1).

        For a node without cores it is the nearest node with cores.
        """
        if not self._nodes or node is None or node < 0:
            return self.parts[0].name
        if node in self._nodes:
            return f"socket{node}"
        nearest = min(self._nodes.values(), key=lambda each: each.distances.get(node, 255))
        return f"socket{nearest.number}"


def _package(tree: Tree, node: numa.NumaNode) -> int | None:
    """Return the number of a node's processor, None if the kernel does not report it."""
    told = tree.number("sys/devices/system/cpu", f"cpu{min(node.cpus)}", "topology/physical_package_id")
    return None if told == -1 else told  # arm64 without a firmware table
