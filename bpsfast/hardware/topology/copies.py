"""Lists the copies between GPUs, memory and network cards (GPUDirect) of a machine, and the links that each crosses.

Sums are made where a copy ends, at a GPU or in a socket's memory; a switch sums nothing. A copy from GPU to GPU stays
below one PCIe switch or on NVLink: across switches it would cross two sockets' links and run at a fraction of their
rate (OSDI'20 section 4.1, the first principle).

A copy between a GPU and a network card (GPUDirect) stays below one PCIe switch, because through a root complex it runs
at less than half of the card's rate (OSDI'20: under 50 of 100 Gbit/s) and some platforms forbid it. Unproven: no GPU
machine has measured it.
"""
from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ...base.settings import Settings
from ...orchestration.errors import ConfigError
from .graph import Link, LinkKind, PartKind, Topology


class Copy(NamedTuple):
    """A copy from the memory of the part *begin* to that of *end*, over *links*."""

    begin: str
    end: str
    links: tuple[Link, ...]


def copies(topology: Topology) -> list[Copy]:
    """Return all copies that *topology* can make; copies with the same ends take different paths."""
    gpus = [part.name for part in topology.of(PartKind.GPU)]
    sockets = [part.name for part in topology.of(PartKind.SOCKET)]
    found = [copy for begin, end in itertools.permutations(gpus, 2) for copy in between_gpus(topology, begin, end)]
    for begin, end in [*itertools.product(gpus, sockets), *itertools.permutations(sockets, 2)]:
        links = topology.path(begin, end)
        if links:
            found.append(Copy(begin, end, links))
    return found


def between_gpus(topology: Topology, begin: str, end: str) -> Iterator[Copy]:
    """Yield the copies from GPU *begin* to GPU *end*: over NVLink, and below a common PCIe switch."""
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
    """Return the PCIe switch above the part *name*, None if it is at a socket."""
    for other, _ in topology.neighbours(name, LinkKind.PCIE):
        if topology.part(other).kind is PartKind.SWITCH:
            return other
    return None


def socket_of(topology: Topology, name: str) -> str:
    """Return the socket nearest to the part *name*; raises `ConfigError` if there is no path to any."""
    sockets = [part.name for part in topology.of(PartKind.SOCKET)]
    paths = {socket: topology.path(name, socket) for socket in sockets}
    near = [(len(path), socket) for socket, path in paths.items() if path]
    if not near:
        raise ConfigError(f"no path leads from {name} to a socket's memory in machine {topology.name}")
    return min(near)[1]


def islands_of(topology: Topology, *kinds: PartKind) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs in groups within which each can copy to each.

    *kinds*: `PartKind.NVSWITCH` for groups over NVLink, `PartKind.SWITCH` for groups below a PCIe switch; none: each
    GPU alone.
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


class GpuNicPair(NamedTuple):
    """A GPU and a card ("" if there is none). `reason`: why the GPU cannot copy to the card, "" if it can."""

    gpu: str
    card: str
    reason: str = ""


def gpu_nic_pairs(topology: Topology) -> Iterator[GpuNicPair]:
    """Yield each GPU of *topology* with each card, or with "" if there is no card."""
    cards = topology.of(PartKind.NIC)
    for gpu in topology.of(PartKind.GPU):
        if not cards:
            yield GpuNicPair(gpu.name, "", "the machine has no network card")
        for card in cards:
            yield GpuNicPair(gpu.name, card.name, _refusal(topology, gpu.name, card.name))


def _refusal(topology: Topology, gpu: str, card: str) -> str:
    switch = switch_of(topology, gpu)
    if switch is not None and switch == switch_of(topology, card):
        return ""
    path = topology.path(gpu, card)
    if not path:
        return f"there is no known path to {card}"
    between = {end for link in path for end in (link.a, link.b)} - {gpu, card}
    sockets = [part.name for part in topology.of(PartKind.SOCKET) if part.name in between]
    n_switches = len(between) - len(sockets)
    if len(sockets) > 1:
        return f"the path to {card} crosses the root complexes of {' and '.join(sockets)}"
    where = "are below different PCIe switches" if n_switches > 1 else "are not below one PCIe switch"
    crossing = f", and the path crosses the root complex of {sockets[0]}" if sockets else ""
    return f"it and {card} {where}{crossing}"


def direct_refusal(topology: Topology, address: str, devices: Collection[str]) -> str:
    """Return why the GPU at *address* on PCIe cannot copy directly to each of the RDMA *devices*, "" if it can."""
    gpu = next((part.name for part in topology.of(PartKind.GPU) if part.address.lower() == address.lower()), None)
    if gpu is None:
        return f"the GPU at {address} is not among those that sysfs shows (a container may hide them)"
    for device in sorted(devices):
        card = next((part.name for part in topology.of(PartKind.NIC) if device in part.device.split(",")), None)
        if card is None:
            return f"{device} is no card on PCIe"
        reason = _refusal(topology, gpu, card)
        if reason:
            return f"{gpu} ({address}) cannot copy directly to {device}: {reason}"
    return ""


def direct_pairs(topology: Topology) -> tuple[GpuNicPair, ...]:
    """Return the pairs that can copy directly."""
    return tuple(pair for pair in gpu_nic_pairs(topology) if not pair.reason)


def enabled_pairs(topology: Topology, settings: Settings) -> tuple[GpuNicPair, ...]:
    """Return the pairs that the setting gpu_direct enables, () if it is off or there are no GPUs.

    Raises `ConfigError` if it is on, and no GPU of this machine can copy directly.
    """
    if not settings.gpu_direct or not topology.of(PartKind.GPU):
        return ()
    found = direct_pairs(topology)
    if not found:
        gpu, reason = refusal_reasons(topology)[0]
        raise ConfigError(f"BPSFAST_GPU_DIRECT = 1: no GPU of machine {topology.name} can copy directly to a network "
                          f"card ({gpu}: {reason}). Put a card below a GPU's PCIe switch (another slot; in a virtual "
                          "machine, let the host show its switches), or unset it: sums then go through memory")
    return found


def refusal_reasons(topology: Topology) -> list[tuple[str, str]]:
    """Return for each GPU that can copy to no card the reason for the nearest card."""
    refused: dict[str, list[tuple[int, str]]] = {}
    able = {pair.gpu for pair in direct_pairs(topology)}
    for pair in gpu_nic_pairs(topology):
        if pair.gpu not in able:
            n_links = len(topology.path(pair.gpu, pair.card)) if pair.card else 0
            refused.setdefault(pair.gpu, []).append((n_links or len(topology.links) + 1, pair.reason))
    return [(gpu, min(reasons, key=lambda each: each[0])[1]) for gpu, reasons in refused.items()]
