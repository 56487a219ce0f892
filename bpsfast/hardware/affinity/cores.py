"""The cores of a machine by NUMA node: what seats are taken from."""
from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from ...base.value_formats import parse_cpus
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


def read(tree: Tree, whole: bool = True) -> Cores:
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
