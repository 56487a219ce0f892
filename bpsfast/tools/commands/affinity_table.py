"""What ``bpsfast topo --cores`` shows: the seating plan of a machine, before any job is there."""
from __future__ import annotations

from typing import Any

from ...base import output, settings
from ...base.value_formats import format_cpus
from ...hardware import numa, recorded_host
from ...hardware.affinity import locality
from ...hardware.affinity.plan import (
    AffinityOptions,
    CpuAffinity,
    Rank,
    plan_node,
    plan_ranks,
    read_cores,
    with_allowed_memory,
)
from ...orchestration.errors import ConfigError

_HEAD = ("WHO", "CORES", "CPUS", "MEMORY ON NODE", "DEVICE")


class AffinityTable:
    """The plan for *n_ranks* ranks (0: one for each GPU, else for each NUMA node) of this machine or a recorded one.

    *names*: the cards that bytes go through; none: those by which settings and routes say that others are reached, else
    the fastest. Of the settings those count that this process has.

    Raises
    ------
    ConfigError
        A card that does not exist, or settings that do not fit the machine.
    """

    def __init__(self, root: str | None, n_ranks: int, names: tuple[str, ...]) -> None:
        host = recorded_host.host(root)
        given, _ = settings.load_with_origins(None, None if root is None else host.kernel.environ)
        self.cores = read_cores(host.tree, given.whole_cores)
        self.allowed = numa.allowed_cpus(host.tree) or self.cores.cpus
        self.cards = _cards(host, given, names)
        gpus = locality.gpu_numa_nodes(host)
        ranks = [Rank(self.allowed, beside=gpus[number] if number < len(gpus) else None)
                 for number in range(n_ranks or len(gpus) or len(self.cores.nodes))]
        self._gpus = gpus
        wishes = AffinityOptions.of(given)
        if not given.numa:
            self.why_not = "BPSFAST_NUMA is off"
        elif len(self.cores.within(self.allowed).nodes) < 2 and not wishes.some:
            self.why_not = "all CPUs are of one NUMA node"
        else:
            self.why_not = ""
        self.node, self.ranks = CpuAffinity(), (CpuAffinity(),) * len(ranks)
        if not self.why_not:
            mems = numa.allowed_nodes(host.tree)
            self.node = with_allowed_memory(plan_node(self.cores, self.allowed, self.cards.nodes, len(ranks), wishes), mems)
            taken = self.node.cpus if self.node.alone else frozenset[int]()
            self.ranks = tuple(with_allowed_memory(seat, mems) for seat in plan_ranks(self.cores, ranks, wishes, taken))

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as data; no CPUs: wherever it may run."""
        return {
            "nodes": {str(number): format_cpus(self.cores.cpus_of(number)) for number in self.cores.nodes},
            "allowed": format_cpus(self.allowed), "cards": list(self.cards.names), "why_not": self.why_not,
            "node": _data(self.node), "ranks": [_data(seat) for seat in self.ranks],
        }

    def text(self) -> str:
        """Return the plan for people."""
        lines = [f"NUMA node {number}: {len(found)} cores, CPUs {format_cpus(self.cores.cpus_of(number))}"
                 for number, found in self.cores.nodes.items()]
        if self.allowed != self.cores.cpus:
            lines.append(f"This process may use CPUs {format_cpus(self.allowed)}")
        if self.why_not:
            return "\n".join([*lines, "", f"Nobody is kept anywhere: {self.why_not}."])
        rows = [_HEAD, self._row("node", self.node, ", ".join(self.cards.names))]
        for number, seat in enumerate(self.ranks):
            gpu = f"gpu{number}" if number < len(self._gpus) else ""
            rows.append(self._row(f"local rank {number}", seat, gpu))
        return "\n".join([*lines, "", output.columns(rows, right=(1,))])

    def _row(self, who: str, seat: CpuAffinity, device: str) -> tuple[str, ...]:
        return (who, str(self.cores.within(seat.cpus or self.allowed).count), format_cpus(seat.cpus) or "any",
                "any" if seat.home is None else str(seat.home), device or "-")


def _cards(host: Any, given: settings.Settings, names: tuple[str, ...]) -> locality.NicLocality:
    if names:
        found = locality.nics_by_name(host, names)
        if missing := sorted(set(names) - {device.name for device in host.devices} - set(host.netdevs)):
            raise ConfigError(f"--nic {missing[0]}: there is no such device or interface; there are "
                              f"{', '.join([device.name for device in host.devices] + list(host.netdevs)) or 'none'}")
        return found
    if isinstance(host.kernel, recorded_host.RecordedKernel):
        found = locality.traffic_nics(host, given, given.node_host)
    else:
        from ...base.addresses import configured_host, default_route_host

        found = locality.traffic_nics(host, given, configured_host(given) or default_route_host())
    return found if found.nodes else locality.fastest_nics(host)


def _data(seat: CpuAffinity) -> dict[str, Any]:
    return {"cpus": format_cpus(seat.cpus), "home": seat.home}
