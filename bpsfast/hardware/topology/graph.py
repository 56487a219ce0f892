"""The topology of a machine as a graph: parts, and links with their rates in bytes/s per direction.

GPUs and network cards are below PCIe switches or directly at a socket; sockets are linked to each other; NVLinks link
GPUs, or GPUs and an NVSwitch. A socket is a NUMA node: a root complex, cores and memory. A copy to a socket is a copy
into its memory.
"""
from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterator

import msgspec

from ...orchestration.errors import DECODE_ERRORS, ConfigError


class PartKind(enum.Enum):
    """The kind of a part."""

    GPU = "gpu"
    SWITCH = "switch"
    SOCKET = "socket"
    NIC = "nic"
    NVSWITCH = "nvswitch"


class LinkKind(enum.Enum):
    """The kind of a link."""

    PCIE = "pcie"
    NVLINK = "nvlink"
    #: between sockets: QPI, UPI, Infinity Fabric
    SOCKETS = "sockets"


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """One part. `name`: "gpu0", "switch1", "socket0", "nic0", "nvswitch0".

    `address`: on PCIe ("0000:3b:00.0"). `model`: for people. `cpus`: of a socket, such as "0-15,32-47".
    `memory_rate_bytes`: of a socket, reads and writes together, bytes/s; 0: unknown and not limited. `wire_rate_bytes`:
    of a network card, bytes/s per direction. `device`: of a card the kernel's names ("mlx5_0", "eth2"), of a GPU NVML's
    index.
    """

    name: str
    kind: PartKind
    address: str = ""
    model: str = ""
    cpus: str = ""
    memory_rate_bytes: float = 0.0
    wire_rate_bytes: float = 0.0
    device: str = ""


class Link(msgspec.Struct, frozen=True, omit_defaults=True):
    """One full-duplex link between the parts *a* and *b*; parallel NVLinks are one link of `n_links` NVLinks.

    `rate_bytes`: of all of them together, bytes/s per direction.
    """

    a: str
    b: str
    kind: LinkKind
    rate_bytes: float
    n_links: int = 1


class Topology(msgspec.Struct, frozen=True):
    """The graph of the machine *name*. Immutable, thread-safe."""

    name: str
    parts: tuple[Part, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        double = {name for name in names if names.count(name) > 1}
        if double:
            raise ConfigError(f"machine {self.name}: two parts are named {', '.join(sorted(double))}")
        for part in self.parts:
            for rate in (part.memory_rate_bytes, part.wire_rate_bytes):
                if not 0.0 <= rate < math.inf:
                    raise ConfigError(f"machine {self.name}: {part.name} has a rate of {rate:g} bytes/s: a rate is a "
                                      "number from 0 on, which means unknown")
        pairs = set()
        for link in self.links:
            for end in (link.a, link.b):
                if end not in names:
                    raise ConfigError(f"machine {self.name}: a link from {link.a} to {link.b}, but no part is named "
                                      f"{end}")
            if not 0.0 < link.rate_bytes < math.inf or link.n_links < 1 or link.a == link.b:
                raise ConfigError(f"machine {self.name}: a link from {link.a} to {link.b} of {link.rate_bytes:g} "
                                  f"bytes/s, {link.n_links} in one: its ends must differ, its rate and number be more "
                                  "than 0")
            pair = frozenset((link.a, link.b)), link.kind
            if pair in pairs:
                raise ConfigError(f"machine {self.name}: two {link.kind.value} links between {link.a} and {link.b}; "
                                  "add their rates up in one")
            pairs.add(pair)

    def of(self, kind: PartKind) -> tuple[Part, ...]:
        """Return the parts of *kind*, in their order."""
        return tuple(part for part in self.parts if part.kind is kind)

    def part(self, name: str) -> Part:
        """Return the part *name*; raises `KeyError`."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    def neighbours(self, name: str, *kinds: LinkKind) -> Iterator[tuple[str, Link]]:
        """Yield the parts that links of *kinds* (default: all) connect to the part *name*, each with its link."""
        for link in self.links:
            if name in (link.a, link.b) and (not kinds or link.kind in kinds):
                yield (link.b if link.a == name else link.a), link

    def path(self, begin: str, end: str, *kinds: LinkKind) -> tuple[Link, ...]:
        """Return the links of the shortest path from *begin* to *end* over links of *kinds*, () if there is none.

        Of paths of equal length the one whose slowest link is fastest, then the first by names. *kinds* are PCIe and
        links between sockets by default: the path of a copy without NVLink. No path leads through a GPU or a card.
        """
        kinds = kinds or (LinkKind.PCIE, LinkKind.SOCKETS)
        ends: dict[str, tuple[float, tuple[Link, ...]]] = {begin: (float("inf"), ())}
        seen = {begin}
        while ends and end not in ends:
            further: dict[str, tuple[float, tuple[Link, ...]]] = {}
            for name in sorted(ends):
                slowest, links = ends[name]
                if name != begin and self.part(name).kind in (PartKind.GPU, PartKind.NIC):
                    continue
                for other, link in self.neighbours(name, *kinds):
                    rate = min(slowest, link.rate_bytes)
                    if other not in seen and rate > further.get(other, (0.0, ()))[0]:
                        further[other] = rate, (*links, link)
            seen |= further.keys()
            ends = further
        return ends[end][1] if end in ends else ()


def to_json(topology: Topology) -> str:
    """Return *topology* as JSON for `from_json`."""
    return msgspec.json.format(msgspec.json.encode(topology), indent=2).decode() + "\n"


def from_json(text: str | bytes) -> Topology:
    """Return the topology that *text* describes; raises `ConfigError` with the fault and its place."""
    try:
        return msgspec.json.decode(text, type=Topology)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"this JSON does not describe a machine: {exc}") from exc
    except DECODE_ERRORS as exc:
        raise ConfigError(f"a machine's description is not JSON: {exc}") from exc


def with_gpus(topology: Topology, names: Collection[str]) -> Topology:
    """Return *topology* with only the GPUs of *names* and without the links of the others."""
    gone = {part.name for part in topology.of(PartKind.GPU)} - set(names)
    return Topology(name=topology.name, parts=tuple(part for part in topology.parts if part.name not in gone),
                    links=tuple(link for link in topology.links if not gone & {link.a, link.b}))


def of_host(n_gpus: int) -> Topology:
    """Return a machine of one socket with *n_gpus* devices below one switch, for ranks whose device is the host."""
    rate = 1e10
    gpus = [Part(f"gpu{i}", PartKind.GPU) for i in range(n_gpus)]
    links = [Link(gpu.name, "switch0", LinkKind.PCIE, rate) for gpu in gpus]
    return Topology("host", (*gpus, Part("switch0", PartKind.SWITCH), Part("socket0", PartKind.SOCKET)),
                    (*links, Link("switch0", "socket0", LinkKind.PCIE, rate)))
