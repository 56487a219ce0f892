"""Which GPUs could hand their sums straight to which network card (GPUDirect), and why others could not.

Only below one PCIe switch: through a root complex such copies run at half the card's rate or less (OSDI'20: under 50 of
100 Gbit/s), and some platforms forbid them. `device.direct` has jobs do it. Unproven: no GPU machine has measured it.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from ...base.settings import Settings
from ...orchestration.errors import ConfigError
from .copies import switch_of
from .graph import PartKind, Topology


class GpuNicPair(NamedTuple):
    """A GPU and a card. `reason`: why the one cannot copy to the other, "" if it can; `card` is "" if there is none."""

    gpu: str
    card: str
    reason: str = ""


def pairs(topology: Topology) -> Iterator[GpuNicPair]:
    """Yield every GPU of *topology* with every card; with none if there is none."""
    cards = topology.of(PartKind.NIC)
    for gpu in topology.of(PartKind.GPU):
        if not cards:
            yield GpuNicPair(gpu.name, "", "the machine has no network card")
        for card in cards:
            yield GpuNicPair(gpu.name, card.name, _reason(topology, gpu.name, card.name))


def _reason(topology: Topology, gpu: str, card: str) -> str:
    switch = switch_of(topology, gpu)
    if switch is not None and switch == switch_of(topology, card):
        return ""
    path = topology.path(gpu, card)
    if not path:
        return f"nobody knows the way to {card}"
    between = {end for link in path for end in (link.a, link.b)} - {gpu, card}
    sockets = [part.name for part in topology.of(PartKind.SOCKET) if part.name in between]
    n_switches = len(between) - len(sockets)
    if len(sockets) > 1:
        return f"the way to {card} crosses the root complexes of {' and '.join(sockets)}"
    where = "hang at different PCIe switches" if n_switches > 1 else "are not below one PCIe switch"
    crossing = f", and the way crosses the root complex of {sockets[0]}" if sockets else ""
    return f"it and {card} {where}{crossing}"


def why_not(topology: Topology, address: str, devices: Collection[str]) -> str:
    """Return why the GPU at *address* on PCIe cannot copy straight to each of the RDMA *devices*; "" if it can."""
    gpu = next((part.name for part in topology.of(PartKind.GPU) if part.address.lower() == address.lower()), None)
    if gpu is None:
        return f"the GPU at {address} is not among those that sysfs shows (a container may hide them)"
    for device in sorted(devices):
        card = next((part.name for part in topology.of(PartKind.NIC) if device in part.device.split(",")), None)
        if card is None:
            return f"{device} is no card on PCIe"
        reason = _reason(topology, gpu, card)
        if reason:
            return f"{gpu} ({address}) cannot copy straight to {device}: {reason}"
    return ""


def possible(topology: Topology) -> tuple[GpuNicPair, ...]:
    """Return the pairs that can."""
    return tuple(pair for pair in pairs(topology) if not pair.reason)


def wished(topology: Topology, settings: Settings) -> tuple[GpuNicPair, ...]:
    """Return the pairs that may as *settings* say, () if they say no, and of a machine without GPUs.

    Raises
    ------
    ConfigError
        It is asked for, and no GPU of this machine can.
    """
    if not settings.gpu_direct or not topology.of(PartKind.GPU):
        return ()
    found = possible(topology)
    if not found:
        gpu, reason = nearest(topology)[0]
        raise ConfigError(f"BPSFAST_GPU_DIRECT = 1: no GPU of machine {topology.name} can copy straight to a network "
                          f"card ({gpu}: {reason}). Put a card below a GPU's PCIe switch (another slot; in a virtual "
                          "machine, let the host show its switches), or unset it: sums then go through memory")
    return found


def nearest(topology: Topology) -> list[tuple[str, str]]:
    """Return for each GPU that can copy to no card why not, of the card with the fewest links between."""
    refused: dict[str, list[tuple[int, str]]] = {}
    able = {pair.gpu for pair in possible(topology)}
    for pair in pairs(topology):
        if pair.gpu not in able:
            n_links = len(topology.path(pair.gpu, pair.card)) if pair.card else 0
            refused.setdefault(pair.gpu, []).append((n_links or len(topology.links) + 1, pair.reason))
    return [(gpu, min(reasons, key=lambda each: each[0])[1]) for gpu, reasons in refused.items()]
