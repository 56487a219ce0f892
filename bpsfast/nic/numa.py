"""NUMA nodes: which cores lie beside which memory and which network card."""
from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from .sysfs import Tree

_NODES = "sys/devices/system/node"


@dataclass(frozen=True)
class NumaNode:
    """One node: its cores, and its distance to each node (10 is itself), as firmware tells it."""

    number: int
    cpus: frozenset[int]
    distances: tuple[int, ...] = ()


def nodes(tree: Tree) -> dict[int, NumaNode]:
    """Return the machine's NUMA nodes by number; empty where the kernel was built without them."""
    found = {}
    for name in tree.names(_NODES):
        if name.startswith("node") and name[4:].isdecimal():
            cpus = parse_cpus(tree.text(_NODES, name, "cpulist") or "")
            distances = tuple(int(word) for word in (tree.text(_NODES, name, "distance") or "").split())
            found[int(name[4:])] = NumaNode(int(name[4:]), cpus, distances)
    return found


def allowed_cpus(tree: Tree) -> frozenset[int]:
    """Return the cores that this process may run on (also a container's cpuset)."""
    for line in (tree.text("proc/self/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_cpus(line.partition(":")[2])
    return frozenset()


def nodes_of(cpus: Set[int], known: dict[int, NumaNode]) -> frozenset[int]:
    """Return the nodes that some of *cpus* belong to."""
    return frozenset(number for number, node in known.items() if node.cpus & cpus)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the cores of a list such as "0-3,8,10-11"."""
    cpus: set[int] = set()
    for word in text.strip().split(","):
        first, dash, last = word.strip().partition("-")
        if first.isdecimal():
            cpus.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cpus)


def format_cpus(cpus: Set[int]) -> str:
    """Return *cpus* as a list such as "0-3,8": the inverse of `parse_cpus`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
