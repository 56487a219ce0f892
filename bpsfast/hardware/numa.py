"""NUMA nodes and their CPUs, and the CPUs and memory nodes that this process may use."""
from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from ..base.value_formats import parse_cpus
from .sysfs import Tree

_NODES = "sys/devices/system/node"


@dataclass(frozen=True)
class NumaNode:
    """One node: its CPUs, and its distance to each node by number (10: itself), empty if firmware reports none."""

    number: int
    cpus: frozenset[int]
    distances: Mapping[int, int] = field(default_factory=dict)


def nodes(tree: Tree) -> dict[int, NumaNode]:
    """Return the machine's NUMA nodes by number; empty if the kernel was built without NUMA."""
    numbers = [int(name[4:]) for name in tree.names(_NODES) if re.fullmatch(r"node\d+", name, re.ASCII)]
    found = {}
    for number in numbers:
        cpus = parse_cpus(tree.text(_NODES, f"node{number}", "cpulist") or "")
        # distances are listed by position among the online nodes, whose numbers may have gaps (POWER9: 0, 8, 252)
        words = (tree.text(_NODES, f"node{number}", "distance") or "").split()
        distances = dict(zip(numbers, map(int, words))) if len(words) == len(numbers) else {}
        found[number] = NumaNode(number, cpus, distances)
    return found


def allowed_cpus(tree: Tree) -> frozenset[int]:
    """Return the CPUs that this process may run on, limited by taskset or a container's cpuset."""
    return parse_cpus(tree.fields("proc/self/status").get("Cpus_allowed_list", ""))


def allowed_nodes(tree: Tree) -> frozenset[int]:
    """Return the nodes whose memory this process may use, empty if the kernel does not say."""
    return parse_cpus(tree.fields("proc/self/status").get("Mems_allowed_list", ""))


def siblings(tree: Tree, cpu: int) -> frozenset[int]:
    """Return the CPUs (hyperthreads) of the core of *cpu*."""
    return parse_cpus(tree.text(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or "") | {cpu}


def nodes_of(cpus: Set[int], known: dict[int, NumaNode]) -> frozenset[int]:
    """Return the nodes with at least one of *cpus*."""
    return frozenset(number for number, node in known.items() if node.cpus & cpus)
