"""The NUMA nodes of devices: of the network cards that carry a node's traffic, and of GPUs."""
from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from ...base.settings import Settings
from ...orchestration.errors import BpsError
from .. import rdma_route
from ..host import Host, RecordedKernel
from ..topology import discovery, nvml
from ..topology.graph import PartKind
from ..topology.pcie import DEVICES


class NicLocality(NamedTuple):
    """Names of network cards, and their NUMA nodes as far as the kernel reports them."""

    names: tuple[str, ...] = ()
    nodes: frozenset[int] = frozenset()


def traffic_nics(host: Host, settings: Settings, address: str) -> NicLocality:
    """Return the cards of a node whose peers connect to *address*: its RDMA ports, else the interface that has it.

    Empty for a virtual interface without a card below it.
    """
    wanted = ipaddress.ip_address(address) if address else None
    if settings.transport in ("auto", "rdma") and not settings.nic_limit and (wanted is None or not wanted.is_loopback):
        try:
            rails = rdma_route.choose(host, settings, wanted).rails
        except BpsError:  # reported later, if RDMA is needed
            rails = ()
        nodes = {device.name: device.numa_node for device in host.devices}
        if rails:
            return _known({rail.device: nodes[rail.device] for rail in rails})
    owner = next((netdev.name for netdev in host.netdevs.values()
                  if any(interface.ip == wanted for interface in netdev.addresses)), "")
    return nics_by_name(host, [owner]) if owner else NicLocality()


def nics_by_name(host: Host, names: Sequence[str]) -> NicLocality:
    """Return the cards of these RDMA devices and interfaces; for a VLAN, bond or bridge those below it."""
    found: dict[str, int | None] = {device.name: device.numa_node for device in host.devices if device.name in names}
    rest, seen = [name for name in names if name not in found], set[str]()
    while rest:
        name = rest.pop()
        netdev = host.netdevs.get(name)
        if netdev is not None and name not in seen:
            seen.add(name)
            if netdev.is_card or netdev.numa_node is not None:
                found[name] = netdev.numa_node
            rest += netdev.lowers
    return _known(found)


def fastest_nics(host: Host) -> NicLocality:
    """Return the cards with the highest rate: a guess, used if neither address nor name is known."""
    found = discovery.machine(host, nvml.NvmlAnswer()).of(PartKind.NIC)
    best = max((card.wire_rate_bytes for card in found), default=0.0)
    return nics_by_name(host, [name for card in found if card.wire_rate_bytes == best
                               for name in card.device.split(",")])


def gpu_numa_nodes(host: Host) -> tuple[int | None, ...]:
    """Return the NUMA node of each GPU (None: not known), in NVML's order, else by PCIe address."""
    answer = None
    if isinstance(host.kernel, RecordedKernel):
        answer = nvml.recorded_answer(host.kernel.answers.nvml)
    parts = discovery.machine(host, nvml.query_nvml() if answer is None else answer).of(PartKind.GPU)
    return tuple(host.tree.numa_node(DEVICES, part.address) for part in parts)


def _known(found: dict[str, int | None]) -> NicLocality:
    return NicLocality(tuple(sorted(found)), frozenset(node for node in found.values() if node is not None))
