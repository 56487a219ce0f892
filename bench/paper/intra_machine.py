"""The rate that a strategy inside a machine leaves of its NIC, and that of gradients to memory and back.

From the loads of its links (`topology.budget`). Reducing and handing back share links, as do copies and the card: where
all are under way at once, as in a pipeline, each takes as long as the link needs for everything on it.
"""
from __future__ import annotations

import math
from typing import NamedTuple

from bpsfast.hardware.topology.copies import socket_of
from bpsfast.hardware.topology.graph import Link, LinkKind, PartKind, Topology
from bpsfast.hardware.topology.loads import Traffic
from bpsfast.hardware.topology.strategy_solver import Strategy
from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.simulator.all_reduce import Ring

#: A load below this, in sizes of the gradient, is rounding.
_NOTHING = 1e-6


class IntraMachine(NamedTuple):
    """Bytes/s: of the card on the wire, one direction; of one gradient that is reduced, and as fast handed back."""

    card_rate: float
    stage_rate: float


def inside(topology: Topology, strategy: Strategy, traffic: Traffic, ring: Ring, partition_nbytes: int) -> IntraMachine:
    """Return what *strategy* makes of the machine *topology* with one card, for *traffic*.

    *ring*: the slices of NCCL's rings, with what each costs, which is the same inside a machine as between machines.
    Raises `ConfigError` if the machine has not one card.
    """
    if len(topology.of(PartKind.NIC)) != 1:
        raise ConfigError(f"machine {topology.name} has {len(topology.of(PartKind.NIC))} network cards; "
                          "one is simulated")
    [card] = topology.of(PartKind.NIC)
    loads = strategy.loads
    on_wire = loads.cards[card.name]
    # a link that the card has to itself is as fast as its wire is measured to be
    path = topology.path(card.name, socket_of(topology, card.name))
    alone = {link for link in path if loads.links[link] < on_wire + _NOTHING}
    times = {link: load / link.rate_bytes for link, load in loads.links.items() if link not in alone}
    wire_s = on_wire / card.wire_rate_bytes if card.wire_rate_bytes else 0.0
    card_s = max([wire_s, *(times[link] for link in path if link in times)])
    # bytes of rings and what slices cost follow one another; copies run beside them
    slices_s = 2 * n_slices(strategy, ring, partition_nbytes) * ring.overhead_s / partition_nbytes
    ring_s = slices_s + max((load / link.rate_bytes for link, load in _of_rings(topology, strategy, path).items()),
                            default=0.0)
    stage_s = max([ring_s, *times.values()])
    return IntraMachine((traffic.worker + traffic.service) / card_s if card_s else math.inf,
                  1.0 / stage_s if stage_s else math.inf)


def _of_rings(topology: Topology, strategy: Strategy, card_path: tuple[Link, ...]) -> dict[Link, float]:
    """Return what islands put on the links between their GPUs: all but copies to memory, and what the card moves."""
    loads = {link: load for link, load in strategy.loads.links.items()
             if link.kind is not LinkKind.SOCKETS and link not in card_path}
    for way in strategy.ways:
        for (root, socket), part in way.copied.items():
            for link in topology.path(root, socket):
                if link in loads:
                    loads[link] -= way.share * part
    return loads


def n_slices(strategy: Strategy, ring: Ring, partition_nbytes: int) -> int:
    """Return how many slices of a partition a GPU passes on one after another, in NCCL's rings.

    All GPUs of an island being its roots they reduce-scatter; else each passes on the whole partition.
    """
    found = 0
    for way in strategy.ways:
        for island in way.islands:
            n_gpus, n_roots = len(island), len(way.roots().keys() & set(island))
            if n_gpus > 1:
                of_one = math.ceil(partition_nbytes / n_gpus / ring.slice_nbytes) * (n_gpus - 1)
                found = max(found, of_one if n_roots == n_gpus else math.ceil(partition_nbytes / ring.slice_nbytes))
    return found
