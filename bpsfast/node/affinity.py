"""Chooses the CPUs and the memory of the node and its ranks, and binds the node's threads (`hardware.affinity`)."""
from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ..base.settings import Settings
from ..base.value_formats import format_cpus, parse_cpus
from ..hardware import numa
from ..hardware.affinity import locality
from ..hardware.affinity.binding import NumaMemory, ThreadBinding
from ..hardware.affinity.plan import (
    AffinityOptions,
    Cores,
    CpuAffinity,
    Rank,
    plan_node,
    plan_ranks,
    read_cores,
    with_allowed_memory,
)
from ..hardware.host import Host
from ..orchestration.messages import Attach

log = logging.getLogger("bpsfast.node")


class NodeAffinity:
    """Binds this process to the CPUs chosen for the node. Make it before any thread that has to follow. One thread.

    *address*: the address to which peers connect, hence the card in use. *host*: the machine; a recorded one in tests.

    Raises `ConfigError` if no CPU is left for the node.
    """

    def __init__(self, settings: Settings, address: str, host: Host | None = None) -> None:
        self._host = host or Host()
        tree = self._host.tree
        self.allowed = numa.allowed_cpus(tree) or frozenset(os.sched_getaffinity(0))
        self.affinity = CpuAffinity()
        self.numa_memory = NumaMemory({})
        self._options = AffinityOptions.of(settings)
        self._cores = Cores({})
        self._mems = numa.allowed_nodes(tree)
        n_nodes = sum(bool(node.cpus) for node in self._host.numa.values())
        self._is_on = settings.numa and (n_nodes > 1 or self._options.some)
        if not self._is_on:
            return
        self._cores = read_cores(tree, settings.whole_cores)
        self.numa_memory = NumaMemory({number: self._cores.cpus_of(number) & self.allowed
                                       for number in self._cores.nodes})
        self._cards = locality.traffic_nics(self._host, settings, address)
        beside, options = self._cards.nodes, self._options
        if settings.cores:  # it keeps to its quota already
            beside, options = frozenset(), AffinityOptions()
        planned = plan_node(self._cores, self.allowed, beside, max(0, settings.local_size), options)
        self.affinity = with_allowed_memory(planned, self._mems)
        if not ThreadBinding(self.affinity.cpus).cpus:  # nothing to do, or refused
            self.affinity = CpuAffinity(home=self.affinity.home)
        log.info("CPU affinity: %s%s", _words("this node", self.affinity),
                 f", beside {', '.join(self._cards.names)}" if self.affinity.cpus and self._cards.nodes else "")

    def of(self, ranks: Sequence[Attach]) -> tuple[CpuAffinity, ...]:
        """Return CPUs and memory of all local *ranks*, in their order.

        Raises `ConfigError` if BPSFAST_RANK_CPUS does not fit them.
        """
        if not self._is_on:
            return (CpuAffinity(),) * len(ranks)
        has_gpus = len(self._cores.nodes) > 1 and any(rank.gpu >= 0 for rank in ranks)
        gpus = locality.gpu_numa_nodes(self._host) if has_gpus else ()
        described = [Rank(parse_cpus(rank.cpus), rank.stays, gpus[rank.gpu] if 0 <= rank.gpu < len(gpus) else None)
                for rank in ranks]
        taken = self.affinity.cpus if self.affinity.alone else frozenset[int]()
        planned = plan_ranks(self._cores, described, self._options, taken)
        affinities = tuple(with_allowed_memory(affinity, self._mems) for affinity in planned)
        log.info("CPU affinity: %s", "; ".join(_words(f"local rank {number}", affinity)
                                               for number, affinity in enumerate(affinities)))
        return affinities


def _words(who: str, affinity: CpuAffinity) -> str:
    where = f"on CPUs {format_cpus(affinity.cpus)}" if affinity.cpus else "where it may run"
    return f"{who} {where}" + ("" if affinity.home is None else f", its memory on NUMA node {affinity.home}")
