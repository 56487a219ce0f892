"""Sockets: the NUMA nodes with their cores, and how fast what joins them is.

A node is taken for a socket, also where firmware divides a processor in several (NPS2, sub-NUMA clusters): each has its
own memory. Nodes without cores (memory on CXL, a GPU's memory) are none.
"""
from __future__ import annotations

import itertools
from dataclasses import dataclass

from ...base.value_formats import format_cpus, parse_cpus
from .. import numa
from ..host import Host
from ..sysfs import Tree
from .graph import Link, LinkKind, Part, PartKind

#: (vendor, family, models) -> bytes/s per direction between two processors: links x transfers/s x bytes of payload.
#: Figures are the vendors' (product briefs, "QPI/UPI speed" in Intel's ARK, AMD's architecture overviews), all of a
#: usual board of two. NCCL's (topo.h: 6, 10, 22 GB/s...) are smaller: they are what a GPU gets that reads another one's
#: memory through both processors; here memory is what moves. The paper has "above 300 Gbit/s" for its Broadwell.
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
#: Between others: one UPI of the slowest kind.
_DEFAULT_RATE_BYTES = 10.4e9 * 2
#: Between nodes of one processor: a guess, more than any of its PCIe links.
_SAME_SOCKET_RATE_BYTES = 100e9


@dataclass(frozen=True)
class Cpu:
    """What /proc/cpuinfo says of the first core; empty and 0 where it does not."""

    vendor: str = ""
    family: int = 0
    model: int = 0
    name: str = ""


def cpu(tree: Tree) -> Cpu:
    """Return the processors' kind: those of one machine are the same."""
    told: dict[str, str] = {}
    for line in (tree.text("proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        told.setdefault(key.strip(), value.strip())
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
        """Return the socket of devices of the NUMA *node*: the first where firmware tells none (-1).

        Of a node without cores it is the nearest one with some.
        """
        if not self._nodes or node is None or node < 0:
            return self.parts[0].name
        if node in self._nodes:
            return f"socket{node}"
        nearest = min(self._nodes.values(), key=lambda each: each.distances.get(node, 255))
        return f"socket{nearest.number}"


def _package(tree: Tree, node: numa.NumaNode) -> int | None:
    """Return the number of the processor that a node belongs to, None if the kernel does not say."""
    told = tree.number("sys/devices/system/cpu", f"cpu{min(node.cpus)}", "topology/physical_package_id")
    return None if told == -1 else told  # arm64's where firmware has no table of it
