"""The affinity plan: the CPUs of the node's threads and of each local rank, and the NUMA nodes of their memory.

The node runs beside the card that carries its traffic. Ranks may run there, too, because the node's threads sleep when
there is nothing to send or to sum. Ranks share the cores equally, spread over all NUMA nodes in local-rank order. With
GPUs each rank runs on its GPU's NUMA node, unless it would get less than half of its share there. Memory that a rank
writes is on the rank's NUMA node, all other memory on the node's.

BytePS's launcher has the same rules (``launcher/launch.py``, `allocate_cpu`): equal shares, the first NUMA node with
enough free cores, fewer cores if none has enough. Different here: the "root" process's part is the node's; a share
larger than a NUMA node is taken from several; ranks that are already bound keep their CPUs.

All functions but `read_cores` are without I/O.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from ...base.settings import Settings
from ...base.value_formats import format_cpus, parse_cpus
from ...orchestration.errors import ConfigError
from .. import numa
from ..sysfs import Tree


@dataclass(frozen=True)
class Cores:
    """The cores of each NUMA node by number, in the order of their CPUs; a core is the set of its CPUs.

    `distances` between nodes are firmware's and may be incomplete.
    """

    nodes: Mapping[int, tuple[frozenset[int], ...]]
    distances: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    @property
    def cpus(self) -> frozenset[int]:
        """All CPUs."""
        return self.cpus_of(*self.nodes)

    @property
    def count(self) -> int:
        """Number of cores."""
        return sum(map(len, self.nodes.values()))

    def cpus_of(self, *nodes: int) -> frozenset[int]:
        """Return the CPUs of these nodes."""
        return frozenset(cpu for node in nodes for core in self.nodes.get(node, ()) for cpu in core)

    def within(self, cpus: Set[int]) -> Cores:
        """Return the nodes and cores limited to *cpus*."""
        left = {number: tuple(core & cpus for core in cores if core & cpus) for number, cores in self.nodes.items()}
        return Cores({number: cores for number, cores in left.items() if cores}, self.distances)

    def apart(self, one: int, other: int) -> int:
        """Return the distance of two nodes."""
        return self.distances.get(one, {}).get(other, 10 if one == other else 20)


def read_cores(tree: Tree, whole: bool = True) -> Cores:
    """Return all cores of the machine; if not *whole*, each CPU counts as a core.

    A kernel without NUMA has one node, number 0. CPUs of which the kernel reports no core count as cores.
    """
    known = {number: node for number, node in numa.nodes(tree).items() if node.cpus}
    if not known:
        cpus = parse_cpus(tree.text("sys/devices/system/cpu/online") or "") or numa.allowed_cpus(tree)
        known = {0: numa.NumaNode(0, cpus)}
    nodes = {}
    for number, node in known.items():
        cores = {numa.siblings(tree, cpu) & node.cpus if whole else frozenset({cpu}) for cpu in node.cpus}
        nodes[number] = tuple(sorted(cores, key=min))
    return Cores(nodes, {number: node.distances for number, node in known.items()})


#: A process is not placed beside a device if it would get less than this part of its equal share of cores there.
_MIN_SHARE = 0.5


@dataclass(frozen=True)
class AffinityOptions:
    """What the settings of the same names ask for."""

    rank_cpus: tuple[frozenset[int], ...] = ()
    rank_cores: int = 0
    node_cores: int = 0
    avoid: frozenset[int] = frozenset()

    @classmethod
    def of(cls, settings: Settings) -> AffinityOptions:
        """Return the options in *settings*."""
        sections = settings.rank_cpus.split(":") if settings.rank_cpus else []
        return cls(tuple(map(parse_cpus, sections)), settings.rank_cores, settings.node_cores,
                   parse_cpus(settings.avoid_cpus))

    @property
    def some(self) -> bool:
        """Whether any is set; they then apply to machines with one NUMA node as well."""
        return bool(self.rank_cpus or self.rank_cores or self.node_cores or self.avoid)


@dataclass(frozen=True)
class Rank:
    """A local rank before planning: the CPUs that it may use.

    `stays`: whether it keeps them in any case. `beside`: the NUMA node of its GPU, None if unknown.
    """

    cpus: frozenset[int]
    stays: bool = False
    beside: int | None = None


@dataclass(frozen=True)
class CpuAffinity:
    """The CPUs of a process (empty: no binding), and `home`: the NUMA node that its memory prefers (None: any).

    `alone`: no other process gets these CPUs.
    """

    cpus: frozenset[int] = frozenset()
    home: int | None = None
    alone: bool = False


def plan_node(cores: Cores, allowed: Set[int], cards: Set[int], n_ranks: int, options: AffinityOptions) -> CpuAffinity:
    """Return the affinity of the node's threads.

    *allowed*: CPUs that its process may use. *cards*: the NUMA nodes of the cards that carry its traffic; empty if
    unknown. *n_ranks*: ranks, for each of which a core is left if the node gets cores of its own. Raises `ConfigError`
    if `AffinityOptions.avoid` leaves no CPU.
    """
    own = cores.within(allowed - options.avoid)
    if options.avoid >= allowed and allowed:
        raise ConfigError(f"BPSFAST_AVOID_CPUS = {format_cpus(options.avoid)} leaves none of the CPUs that this "
                          f"process may use: {format_cpus(allowed)} (taskset, cpuset)")
    beside = own.within(own.cpus_of(*cards))
    if beside.count * len(own.nodes) < _MIN_SHARE * own.count * len(beside.nodes) or not beside.nodes:
        beside = own
    n_cores = min(options.node_cores, beside.count, own.count - n_ranks)
    cpus = _union(_last(beside, n_cores)) if n_cores > 0 else beside.cpus
    return CpuAffinity(frozenset() if cpus >= allowed else cpus, _home(cores, cpus), alone=n_cores > 0)


def plan_ranks(cores: Cores, ranks: Sequence[Rank], options: AffinityOptions,
               taken: Set[int] = frozenset()) -> tuple[CpuAffinity, ...]:
    """Return the affinity of each of *ranks*, in local-rank order. *taken*: CPUs that only the node uses.

    Ranks with different CPUs have been bound on purpose and keep them. Raises `ConfigError` if
    `AffinityOptions.rank_cpus` does not have usable CPUs for each rank.
    """
    shares = _given(ranks, options) if options.rank_cpus else _shares(cores, ranks, options, taken)
    cpus = [frozenset() if rank.stays or share >= rank.cpus else share for rank, share in zip(ranks, shares)]
    return tuple(CpuAffinity(each, _home(cores, each or rank.cpus)) for rank, each in zip(ranks, cpus))


def with_allowed_memory(affinity: CpuAffinity, mems: Set[int]) -> CpuAffinity:
    """Return *affinity* without a home outside *mems*, the memory nodes of the process (empty: unknown)."""
    return CpuAffinity(affinity.cpus, None, affinity.alone) if mems and affinity.home not in mems else affinity


def _given(ranks: Sequence[Rank], options: AffinityOptions) -> list[frozenset[int]]:
    if len(options.rank_cpus) < len(ranks):
        raise ConfigError(f"BPSFAST_RANK_CPUS names the CPUs of {len(options.rank_cpus)} local ranks, but there are "
                          f"{len(ranks)}: expected as many lists, with : between them")
    shares = []
    for number, (rank, wanted) in enumerate(zip(ranks, options.rank_cpus)):
        shares.append(wanted & rank.cpus - options.avoid)
        if not shares[-1]:
            raise ConfigError(f"BPSFAST_RANK_CPUS gives CPUs {format_cpus(wanted)} to local rank {number}, which "
                              f"may run on none of them, but on {format_cpus(rank.cpus - options.avoid)} (taskset, "
                              "cpuset, BPSFAST_AVOID_CPUS)")
    return shares


def _shares(cores: Cores, ranks: Sequence[Rank], options: AffinityOptions, taken: Set[int]) -> list[frozenset[int]]:
    """Return disjoint shares of the cores, or empty ones if the cores are not to be shared out."""
    none = [frozenset[int]()] * len(ranks)
    if len({rank.cpus for rank in ranks}) != 1:
        return none
    pool = cores.within(ranks[0].cpus - options.avoid - taken)
    if pool.count < len(ranks) or (len(pool.nodes) == 1 and not options.some):
        return none
    n_cores = min(options.rank_cores or pool.count, pool.count // len(ranks))
    left = {number: list(each) for number, each in pool.nodes.items()}
    numbers = sorted(left)
    n_beside = Counter(rank.beside for rank in ranks)
    shares = []
    for index, rank in enumerate(ranks):
        n_here, where = n_cores, numbers[index * len(numbers) // len(ranks)]
        if rank.beside is not None and rank.beside in pool.nodes:
            where = rank.beside
            n_each = len(pool.nodes[where]) // n_beside[where]
            if not options.rank_cores and _MIN_SHARE * n_cores <= n_each < n_cores:
                n_here = max(1, n_each)
        shares.append(_take(pool, left, n_here, where))
    return shares


def _take(pool: Cores, left: dict[int, list[frozenset[int]]], n_cores: int, first: int | None) -> frozenset[int]:
    """Remove *n_cores* cores from *left*: of one NUMA node (fewer if none has enough), or of several."""
    taken: list[frozenset[int]] = []
    if n_cores > max(map(len, pool.nodes.values())):
        begin = first if first is not None and left[first] else next(number for number in sorted(left) if left[number])
        for number in sorted(left, key=lambda number: (pool.apart(begin, number), number)):
            more = n_cores - len(taken)
            taken += left[number][:more]
            del left[number][:more]
    else:
        n_found = min(n_cores, max(map(len, left.values())))
        number = min((number for number, cores in left.items() if len(cores) >= n_found),
                     key=lambda number: (number != first, number))
        taken = left[number][:n_found]
        del left[number][:n_found]
    return _union(taken)


def _last(cores: Cores, n_cores: int) -> list[frozenset[int]]:
    """Return *n_cores* cores, equally many of each NUMA node; the last ones, as interrupts use the first."""
    left = {number: list(each) for number, each in cores.nodes.items()}
    return [max(left.items(), key=lambda item: (len(item[1]), -item[0]))[1].pop() for _ in range(n_cores)]


def _home(cores: Cores, cpus: Set[int]) -> int | None:
    """Return the NUMA node with most of *cpus*; None if they are on all nodes."""
    counts = {number: len(cores.cpus_of(number) & cpus) for number in cores.nodes}
    there = [number for number, count in counts.items() if count]
    if not there or len(there) == len(counts):
        return None
    return max(there, key=lambda number: (counts[number], -number))


def _union(cores: Sequence[frozenset[int]]) -> frozenset[int]:
    return frozenset(cpu for core in cores for cpu in core)
