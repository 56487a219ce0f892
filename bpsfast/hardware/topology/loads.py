"""Computes the load that a training step's gradients put on each link, network card and memory of a machine.

Loads are terms of a linear program (`LinkLoads`), or values (`Loads`). Sizes are relative to the gradient's; times are
seconds for each byte of it. Results take the same paths as the gradients, reversed. Links are full duplex, so a link
carries in each direction the sum of the copies over it.
"""
from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from ...orchestration.errors import ConfigError
from .copies import Copy, GpuNicPair, between_gpus, islands_of
from .graph import Link, LinkKind, PartKind, Topology
from .linear_program import LinearProgram

Terms = dict[Hashable, float]

#: The variable that is minimized: the time of the busiest link, card or memory.
TIME = "time"
#: Memory accesses of a socket for each incoming and each outgoing byte, both ways: an input is written, read for the
#: sum, and its result read; a sum is written, read to be sent, and its result written.
_N_MOVES = 3
#: For each byte that the machine sums for others: received, read, written, sent.
_N_SERVICE_MOVES = 4


class Traffic(NamedTuple):
    """The traffic of a machine's network cards in a step, per direction: its own gradients, and sums for others.

    With n machines and no helpers each sums an n-th part: service = (n - 2) / n (OSDI'20 section 4.2).
    """

    worker: float = 1.0
    service: float = 0.0


#: The traffic of a machine that sums nothing for others.
OWN_GRADIENTS = Traffic()


class Loads(NamedTuple):
    """The loads of links and cards per direction and of sockets' memory; `time`: of the busiest of them."""

    links: dict[Link, float]
    cards: dict[str, float]
    memories: dict[str, float]
    time: float


class LinkLoads:
    """Collects which variables load which link, card and memory, then limits the loads by rate times `TIME`."""

    def __init__(self, topology: Topology, traffic: Traffic) -> None:
        if not topology.of(PartKind.SOCKET):
            raise ConfigError(f"machine {topology.name} has no socket, and so no memory to send from")
        self.topology = topology
        self.traffic = traffic
        self._links: defaultdict[Link, Terms] = defaultdict(lambda: defaultdict(float))
        self._cards: defaultdict[str, Terms] = defaultdict(lambda: defaultdict(float))
        self._memories: defaultdict[str, Terms] = defaultdict(lambda: defaultdict(float))
        self._unit = max((link.rate_bytes for link in topology.links), default=1.0)
        self.sockets = sorted(part.name for part in topology.of(PartKind.SOCKET))

    def carry(self, copy: Copy, variable: Hashable) -> None:
        """Let *copy* carry *variable*, a part of the gradient."""
        for link in copy.links:
            self._links[link][variable] += 1.0
        for end in (copy.begin, copy.end):
            if end in self.sockets:
                self._memories[end][variable] += _N_MOVES

    def fill(self, links: Mapping[Link, float], variable: Hashable) -> None:
        """Let each of *links* carry *variable* times its factor."""
        for link, factor in links.items():
            self._links[link][variable] += factor

    def send(self, program: LinearProgram, direct: Collection[GpuNicPair] = ()) -> dict[str, Terms]:
        """Send the whole sum from sockets over cards; return the share that each socket sends, as terms.

        A machine without a card has its sum in the memory of any socket. Sums for others are sent from memory over any
        card. *direct*: GPUs that may send to a card without memory; the part of the gradient that the machine itself
        sums is included, although it must be in memory.
        """
        shares: dict[str, Terms] = {socket: {} for socket in self.sockets}
        service: Terms = {}
        cards = self.topology.of(PartKind.NIC)
        for socket, terms in shares.items():
            if not cards:
                terms["sum", socket] = 1.0
            for card in cards:
                path = self.topology.path(socket, card.name)
                if not path:
                    continue
                for kind, factor, moves in (("worker", self.traffic.worker, _N_MOVES),
                                            ("service", self.traffic.service, _N_SERVICE_MOVES)):
                    variable = kind, socket, card.name
                    for link in path:
                        self._links[link][variable] += factor
                    self._cards[card.name][variable] += factor
                    self._memories[socket][variable] += factor * moves
                terms["worker", socket, card.name] = 1.0
                service["service", socket, card.name] = 1.0
        if not any(shares.values()):
            raise ConfigError(f"machine {self.topology.name}: no path leads from a socket to a network card")
        for pair in direct:
            sent = "direct", pair.gpu, pair.card
            self.fill(dict.fromkeys(self.topology.path(pair.gpu, pair.card, LinkKind.PCIE), self.traffic.worker), sent)
            self._cards[pair.card][sent] += self.traffic.worker
            shares.setdefault(pair.gpu, {})[sent] = 1.0
        program.equal({variable: 1.0 for terms in shares.values() for variable in terms}, 1.0)
        if service:
            program.equal(service, 1.0)
        return shares

    def limit(self, program: LinearProgram) -> Terms:
        """Limit all loads by `TIME`; return the sum of their times as terms, which is minimized second.

        Both are in units of the fastest link's time for a byte, because solvers ignore differences below 1e-7.
        """
        total: Terms = defaultdict(float)
        program.at_most({TIME: -1.0}, 0.0)  # needed if nothing is limited
        for terms, rate in self._limited():
            program.at_most({**terms, TIME: -rate / self._unit}, 0.0)
            for variable, factor in terms.items():
                total[variable] += factor * self._unit / rate
        return total

    def _limited(self) -> list[tuple[Terms, float]]:
        part = self.topology.part
        limited = [(terms, link.rate_bytes) for link, terms in self._links.items()]
        limited += [(terms, part(name).wire_rate_bytes) for name, terms in self._cards.items()]
        limited += [(terms, part(name).memory_rate_bytes) for name, terms in self._memories.items()]
        return [(terms, rate) for terms, rate in limited if rate > 0.0]

    def loads(self, values: Mapping[Hashable, float]) -> Loads:
        """Return the loads for the program's *values*."""
        def value(terms: Terms) -> float:
            return sum(factor * values.get(variable, 0.0) for variable, factor in terms.items())

        return Loads({link: value(self._links[link]) for link in self.topology.links},
                     {name: value(terms) for name, terms in self._cards.items()},
                     {name: value(terms) for name, terms in self._memories.items()},
                     max((value(terms) / rate for terms, rate in self._limited()), default=0.0))


def reduce_to(budget: LinkLoads, island: Sequence[str], root: str, variable: Hashable) -> None:
    """Let the GPUs of *island* sum *variable* of the gradient at *root*.

    Over NVLink as in NCCL's rings: each GPU sends and receives all of it, over its links in proportion to their rates.
    Below one switch by direct copies, which with many roots are a reduce-scatter. Otherwise along NCCL's ring from GPU
    to GPU, so that a switch's link is crossed once in each direction.
    """
    topology = budget.topology
    nvlinks = _nvlinks(topology, island)
    if nvlinks:
        budget.fill(nvlinks, variable)
        return
    if any(set(island) <= set(each) for each in islands_of(topology, PartKind.SWITCH)):
        hops = [(gpu, root) for gpu in island if gpu != root]
    else:
        place = island.index(root) + 1
        hops = list(itertools.pairwise([*island[place:], *island[:place]]))
    for begin, end in hops:
        copy = next(between_gpus(topology, begin, end), None) or Copy(begin, end, topology.path(begin, end))
        budget.fill(dict.fromkeys(copy.links, 1.0), variable)


def _nvlinks(topology: Topology, island: Sequence[str]) -> dict[Link, float]:
    """Return the island's NVLinks with the load of each for a byte, {} if they do not connect the whole island."""
    if len(island) < 2 or not any(set(island) <= set(each) for each in islands_of(topology, PartKind.NVSWITCH)):
        return {}
    ends = {*island, *(part.name for part in topology.of(PartKind.NVSWITCH))}
    links = [link for link in topology.links if link.kind is LinkKind.NVLINK and {link.a, link.b} <= ends]
    of_gpu = {gpu: sum(link.rate_bytes for link in links if gpu in (link.a, link.b)) for gpu in island}
    return {link: 2.0 * link.rate_bytes / min(of_gpu[end] for end in (link.a, link.b) if end in of_gpu)
            for link in links if of_gpu.keys() & {link.a, link.b}}
