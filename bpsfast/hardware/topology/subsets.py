"""A machine with some of its GPUs only: those that ranks of a job have."""
from __future__ import annotations

from collections.abc import Collection

from .graph import Link, LinkKind, Part, PartKind, Topology


def with_gpus(topology: Topology, names: Collection[str]) -> Topology:
    """Return *topology* without the GPUs that are not among *names*, and without their links."""
    gone = {part.name for part in topology.of(PartKind.GPU)} - set(names)
    return Topology(name=topology.name, parts=tuple(part for part in topology.parts if part.name not in gone),
                    links=tuple(link for link in topology.links if not gone & {link.a, link.b}))


def of_host(n_gpus: int) -> Topology:
    """Return a machine of one socket, and *n_gpus* devices below one switch of it: what ranks are whose device is the
    host.
    """
    rate = 1e10
    gpus = [Part(f"gpu{i}", PartKind.GPU) for i in range(n_gpus)]
    links = [Link(gpu.name, "switch0", LinkKind.PCIE, rate) for gpu in gpus]
    return Topology("host", (*gpus, Part("switch0", PartKind.SWITCH), Part("socket0", PartKind.SOCKET)),
                    (*links, Link("switch0", "socket0", LinkKind.PCIE, rate)))
