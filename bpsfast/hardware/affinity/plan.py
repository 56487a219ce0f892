"""The seating plan: which CPUs the node's threads and each local rank run on, and which NUMA node their memory prefers.

The node sits beside the card that its bytes go through, where ranks may sit, too: its threads sleep as long as there is
nothing to send or to sum. Ranks share the cores out, spread over all NUMA nodes in local-rank order; with GPUs each
sits at its GPU's node, unless so many do that it would have less than half of its share there. What a rank writes is at
home where the rank is, all else where the node is.

As BytePS's launcher has it (``launcher/launch.py``, `allocate_cpu`): a rank's share of the cores, the first node that
has enough left, fewer cores if none has. Otherwise than there, the part of the "root" is the node's, a rank whose share
is larger than a node has cores of several (there the rest of the machine is left unused), and who is bound is left
alone.

Functions without I/O.
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
    """Of each NUMA node, by number, its cores in the order of their CPUs; a core is the set of its CPUs.

    `distances`: of nodes, as firmware tells them; may lack some.
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
        """Return the CPUs of these nodes; one without cores has none."""
        return frozenset(cpu for node in nodes for core in self.nodes.get(node, ()) for cpu in core)

    def within(self, cpus: Set[int]) -> Cores:
        """Return what is left of nodes and cores if only *cpus* may be used."""
        left = {number: tuple(core & cpus for core in cores if core & cpus) for number, cores in self.nodes.items()}
        return Cores({number: cores for number, cores in left.items() if cores}, self.distances)

    def apart(self, one: int, other: int) -> int:
        """Return the distance of two nodes."""
        return self.distances.get(one, {}).get(other, 10 if one == other else 20)


def read_cores(tree: Tree, whole: bool = True) -> Cores:
    """Return the machine's cores, whoever may use them; not *whole*: each CPU counts as a core.

    A kernel without NUMA has one node, number 0. Where it does not say which CPUs are one core, each is one.
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


#: With less than this part of its even share of cores nobody is put beside a device: a cpuset has left no more there,
#: or too many others want to sit there.
_MIN_SHARE = 0.5


@dataclass(frozen=True)
class AffinityOptions:
    """What settings ask for: see those of the same names."""

    rank_cpus: tuple[frozenset[int], ...] = ()
    rank_cores: int = 0
    node_cores: int = 0
    avoid: frozenset[int] = frozenset()

    @classmethod
    def of(cls, settings: Settings) -> AffinityOptions:
        """Return the wishes of *settings*."""
        sections = settings.rank_cpus.split(":") if settings.rank_cpus else []
        return cls(tuple(map(parse_cpus, sections)), settings.rank_cores, settings.node_cores,
                   parse_cpus(settings.avoid_cpus))

    @property
    def some(self) -> bool:
        """Whether anything is asked for, which then holds on one NUMA node, too."""
        return bool(self.rank_cpus or self.rank_cores or self.node_cores or self.avoid)


@dataclass(frozen=True)
class Rank:
    """A local rank as it came: the CPUs that it may run on; whether it *stays* on them whatever is planned; the NUMA
    node of its GPU, None if it has none or nobody knows.
    """

    cpus: frozenset[int]
    stays: bool = False
    beside: int | None = None


@dataclass(frozen=True)
class CpuAffinity:
    """The CPUs that somebody is to be kept to (none: to what it may use anyway), and the NUMA node that its memory is
    to be on, if it is to be on one. `alone`: nobody else gets these CPUs.
    """

    cpus: frozenset[int] = frozenset()
    home: int | None = None
    alone: bool = False


def plan_node(cores: Cores, allowed: Set[int], cards: Set[int], n_ranks: int, wishes: AffinityOptions) -> CpuAffinity:
    """Return the seat of the node's threads.

    Parameters
    ----------
    allowed
        CPUs that its process may use.
    cards
        The NUMA nodes of the cards that its bytes go through; none: nobody knows.
    n_ranks
        Ranks that need a core besides, if some are the node's alone.

    Raises
    ------
    ConfigError
        If `AffinityOptions.avoid` leaves nothing.
    """
    own = cores.within(allowed - wishes.avoid)
    if wishes.avoid >= allowed and allowed:
        raise ConfigError(f"BPSFAST_AVOID_CPUS = {format_cpus(wishes.avoid)} leaves none of the CPUs that this "
                          f"process may use: {format_cpus(allowed)} (taskset, cpuset)")
    beside = own.within(own.cpus_of(*cards))
    if beside.count * len(own.nodes) < _MIN_SHARE * own.count * len(beside.nodes) or not beside.nodes:
        beside = own
    n_cores = min(wishes.node_cores, beside.count, own.count - n_ranks)
    cpus = _union(_last(beside, n_cores)) if n_cores > 0 else beside.cpus
    return CpuAffinity(frozenset() if cpus >= allowed else cpus, _home(cores, cpus), alone=n_cores > 0)


def plan_ranks(cores: Cores, ranks: Sequence[Rank], wishes: AffinityOptions, taken: Set[int] = frozenset()) -> tuple[CpuAffinity, ...]:
    """Return the seats of *ranks*, in local-rank order. *taken*: CPUs that are the node's alone.

    Ranks that may not all use the same CPUs have been bound by somebody, who knows why.

    Raises
    ------
    ConfigError
        If `AffinityOptions.rank_cpus` has not CPUs for each that it may run on.
    """
    shares = _given(ranks, wishes) if wishes.rank_cpus else _shares(cores, ranks, wishes, taken)
    cpus = [frozenset() if rank.stays or share >= rank.cpus else share for rank, share in zip(ranks, shares)]
    return tuple(CpuAffinity(each, _home(cores, each or rank.cpus)) for rank, each in zip(ranks, cpus))


def with_allowed_memory(seat: CpuAffinity, mems: Set[int]) -> CpuAffinity:
    """Return *seat* without a home whose memory the process may not use: that of *mems* it may, none: nobody knows."""
    return CpuAffinity(seat.cpus, None, seat.alone) if mems and seat.home not in mems else seat


def _given(ranks: Sequence[Rank], wishes: AffinityOptions) -> list[frozenset[int]]:
    if len(wishes.rank_cpus) < len(ranks):
        raise ConfigError(f"BPSFAST_RANK_CPUS names the CPUs of {len(wishes.rank_cpus)} local ranks, but there are "
                          f"{len(ranks)}: expected as many lists, with : between them")
    shares = []
    for number, (rank, wanted) in enumerate(zip(ranks, wishes.rank_cpus)):
        shares.append(wanted & rank.cpus - wishes.avoid)
        if not shares[-1]:
            raise ConfigError(f"BPSFAST_RANK_CPUS gives CPUs {format_cpus(wanted)} to local rank {number}, which "
                              f"may run on none of them, but on {format_cpus(rank.cpus - wishes.avoid)} (taskset, "
                              "cpuset, BPSFAST_AVOID_CPUS)")
    return shares


def _shares(cores: Cores, ranks: Sequence[Rank], wishes: AffinityOptions, taken: Set[int]) -> list[frozenset[int]]:
    """Return disjoint shares of the cores; empty ones where there is nothing to share out."""
    none = [frozenset[int]()] * len(ranks)
    if len({rank.cpus for rank in ranks}) != 1:
        return none
    pool = cores.within(ranks[0].cpus - wishes.avoid - taken)
    if pool.count < len(ranks) or (len(pool.nodes) == 1 and not wishes.some):
        return none
    n_cores = min(wishes.rank_cores or pool.count, pool.count // len(ranks))
    left = {number: list(each) for number, each in pool.nodes.items()}
    numbers = sorted(left)
    n_beside = Counter(rank.beside for rank in ranks)
    shares = []
    for index, rank in enumerate(ranks):
        n_here, where = n_cores, numbers[index * len(numbers) // len(ranks)]
        if rank.beside is not None and rank.beside in pool.nodes:
            where = rank.beside
            n_each = len(pool.nodes[where]) // n_beside[where]
            if not wishes.rank_cores and _MIN_SHARE * n_cores <= n_each < n_cores:
                n_here = max(1, n_each)
        shares.append(_take(pool, left, n_here, where))
    return shares


def _take(pool: Cores, left: dict[int, list[frozenset[int]]], n_cores: int, first: int | None) -> frozenset[int]:
    """Take *n_cores* cores out of *left*: of one node, fewer if none has so many; of several if none ever had."""
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
    """Return *n_cores* cores, as many of each node as of the next: the last ones, for interrupts like the first."""
    left = {number: list(each) for number, each in cores.nodes.items()}
    return [max(left.items(), key=lambda item: (len(item[1]), -item[0]))[1].pop() for _ in range(n_cores)]


def _home(cores: Cores, cpus: Set[int]) -> int | None:
    """Return the NUMA node that most of *cpus* are at; None if they are at all nodes, so that none is better."""
    counts = {number: len(cores.cpus_of(number) & cpus) for number in cores.nodes}
    there = [number for number, count in counts.items() if count]
    if not there or len(there) == len(counts):
        return None
    return max(there, key=lambda number: (counts[number], -number))


def _union(cores: Sequence[frozenset[int]]) -> frozenset[int]:
    return frozenset(cpu for core in cores for cpu in core)
