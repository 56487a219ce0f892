"""Computes a machine's NIC rate and reduction rate for a strategy of summing among its GPUs, for simulated figures.

Both follow from the loads of the links (`topology.budget`). Reduction, broadcast, copies and the network card share
links. In a pipeline all run at once, so each takes as long as the link needs for its whole load.
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

#: A smaller load, in sizes of the gradient, is a rounding error.
_NOTHING = 1e-6


class IntraMachine(NamedTuple):
    """Rates in bytes/s: of the card in one direction, and of the reduction (and of the broadcast) of one gradient."""

    card_rate: float
    stage_rate: float


def inside(topology: Topology, strategy: Strategy, traffic: Traffic, ring: Ring, partition_nbytes: int) -> IntraMachine:
    """Return the rates of the machine *topology* with *strategy* and *traffic*.

    *ring*: the slices of NCCL's rings and the cost of each, which is the same inside and between machines. Raises
    `ConfigError` unless the machine has exactly one card.
    """
    if len(topology.of(PartKind.NIC)) != 1:
        raise ConfigError(f"machine {topology.name} has {len(topology.of(PartKind.NIC))} network cards; "
                          "one is simulated")
    [card] = topology.of(PartKind.NIC)
    loads = strategy.loads
    on_wire = loads.cards[card.name]
    # a link that only the card uses is as fast as the card's measured rate
    path = topology.path(card.name, socket_of(topology, card.name))
    alone = {link for link in path if loads.links[link] < on_wire + _NOTHING}
    times = {link: load / link.rate_bytes for link, load in loads.links.items() if link not in alone}
    wire_s = on_wire / card.wire_rate_bytes if card.wire_rate_bytes else 0.0
    card_s = max([wire_s, *(times[link] for link in path if link in times)])
    # a ring's bytes and the overheads of its slices add up; copies run at the same time
    slices_s = 2 * n_slices(strategy, ring, partition_nbytes) * ring.overhead_s / partition_nbytes
    ring_s = slices_s + max((load / link.rate_bytes for link, load in _of_rings(topology, strategy, path).items()),
                            default=0.0)
    stage_s = max([ring_s, *times.values()])
    return IntraMachine((traffic.worker + traffic.service) / card_s if card_s else math.inf,
                  1.0 / stage_s if stage_s else math.inf)


def _of_rings(topology: Topology, strategy: Strategy, card_path: tuple[Link, ...]) -> dict[Link, float]:
    """Return the loads of the islands on the links between GPUs, without copies to memory and the card's traffic."""
    loads = {link: load for link, load in strategy.loads.links.items()
             if link.kind is not LinkKind.SOCKETS and link not in card_path}
    for way in strategy.ways:
        for (root, socket), part in way.copied.items():
            for link in topology.path(root, socket):
                if link in loads:
                    loads[link] -= way.share * part
    return loads


def n_slices(strategy: Strategy, ring: Ring, partition_nbytes: int) -> int:
    """Return how many slices of a partition a GPU forwards one after another in NCCL's rings.

    If all GPUs of an island are its roots they reduce-scatter; otherwise each forwards the whole partition.
    """
    found = 0
    for way in strategy.ways:
        for island in way.islands:
            n_gpus, n_roots = len(island), len(way.roots().keys() & set(island))
            if n_gpus > 1:
                of_one = math.ceil(partition_nbytes / n_gpus / ring.slice_nbytes) * (n_gpus - 1)
                found = max(found, of_one if n_roots == n_gpus else math.ceil(partition_nbytes / ring.slice_nbytes))
    return found
