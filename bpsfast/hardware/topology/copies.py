"""The copies that a machine can make in one piece, and the links that each of them crosses.

Data is added where a copy ends: at a GPU or in a socket's memory. What lies between, a switch, adds nothing. A copy
from GPU to GPU stays below one PCIe switch or on NVLink: across switches it would cross two sockets' links and run at
a fraction of their rate (OSDI'20 section 4.1, the first principle).
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ...orchestration.errors import ConfigError
from .graph import Link, LinkKind, PartKind, Topology


class Copy(NamedTuple):
    """From the memory of the part *begin* to that of *end*, over *links*."""

    begin: str
    end: str
    links: tuple[Link, ...]


def copies(topology: Topology) -> list[Copy]:
    """Return every copy that *topology* can make; several with the same ends take different ways."""
    gpus = [part.name for part in topology.of(PartKind.GPU)]
    sockets = [part.name for part in topology.of(PartKind.SOCKET)]
    found = [copy for begin, end in itertools.permutations(gpus, 2) for copy in between_gpus(topology, begin, end)]
    for begin, end in [*itertools.product(gpus, sockets), *itertools.permutations(sockets, 2)]:
        links = topology.path(begin, end)
        if links:
            found.append(Copy(begin, end, links))
    return found


def between_gpus(topology: Topology, begin: str, end: str) -> Iterator[Copy]:
    """Yield the copies from GPU *begin* to GPU *end*: over NVLink if there is one, or below a PCIe switch."""
    kinds = {part.name: part.kind for part in topology.parts}
    there = dict(topology.neighbours(end, LinkKind.NVLINK))
    nvlinks = dict(topology.neighbours(begin, LinkKind.NVLINK))
    if end in nvlinks:
        yield Copy(begin, end, (nvlinks[end],))
    for name, link in nvlinks.items():
        if kinds[name] is PartKind.NVSWITCH and name in there:
            yield Copy(begin, end, (link, there[name]))
    switch = switch_of(topology, begin)
    if switch is not None and switch == switch_of(topology, end):
        yield Copy(begin, end, topology.path(begin, end, LinkKind.PCIE))


def switch_of(topology: Topology, name: str) -> str | None:
    """Return the PCIe switch that the part *name* hangs at; None at a socket."""
    for other, _ in topology.neighbours(name, LinkKind.PCIE):
        if topology.part(other).kind is PartKind.SWITCH:
            return other
    return None


def socket_of(topology: Topology, name: str) -> str:
    """Return the socket nearest to the part *name*; raises `ConfigError` if none is joined to it."""
    sockets = [part.name for part in topology.of(PartKind.SOCKET)]
    paths = {socket: topology.path(name, socket) for socket in sockets}
    near = [(len(path), socket) for socket, path in paths.items() if path]
    if not near:
        raise ConfigError(f"no path leads from {name} to a socket's memory in machine {topology.name}")
    return min(near)[1]


def islands_of(topology: Topology, *kinds: PartKind) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs in groups within which data gets from each to each: over NVLink, or below one switch.

    *kinds*: `PartKind.NVSWITCH` for groups over NVLink, `PartKind.SWITCH` for those below a PCIe switch; none: each GPU alone.
    """
    gpus = [part.name for part in topology.of(PartKind.GPU)]
    group = {name: name for name in gpus}
    for begin, end in itertools.combinations(gpus, 2):
        joined = any((copy.links[0].kind is LinkKind.NVLINK) == (kind is PartKind.NVSWITCH)
                     for copy in between_gpus(topology, begin, end) for kind in kinds)
        if joined and group[begin] != group[end]:
            old, new = group[end], group[begin]
            group = {name: new if of == old else of for name, of in group.items()}
    return tuple(tuple(name for name in gpus if group[name] == of) for of in dict.fromkeys(group.values()))
