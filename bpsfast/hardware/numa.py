"""NUMA nodes: which cores lie beside which memory and which network card."""
from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from .sysfs import Tree

_NODES = "sys/devices/system/node"
#: Linux has at most 8192; whoever says more is not worth a set of that size.
_MAX_CPUS = 1 << 16


@dataclass(frozen=True)
class NumaNode:
    """One node: its cores, and its distance to each node by number (10 is itself), as firmware tells it; else empty."""

    number: int
    cpus: frozenset[int]
    distances: Mapping[int, int] = field(default_factory=dict)


def nodes(tree: Tree) -> dict[int, NumaNode]:
    """Return the machine's NUMA nodes by number; empty where the kernel was built without them."""
    numbers = [int(name[4:]) for name in tree.names(_NODES) if re.fullmatch(r"node\d+", name, re.ASCII)]
    found = {}
    for number in numbers:
        cpus = parse_cpus(tree.text(_NODES, f"node{number}", "cpulist") or "")
        # The kernel writes one distance for each node that is online, so numbers may be missing between them (POWER9
        # has 0, 8, 252...): the position is no number.
        words = (tree.text(_NODES, f"node{number}", "distance") or "").split()
        distances = dict(zip(numbers, map(int, words))) if len(words) == len(numbers) else {}
        found[number] = NumaNode(number, cpus, distances)
    return found


def allowed_cpus(tree: Tree) -> frozenset[int]:
    """Return the cores that this process may run on (also a container's cpuset)."""
    return parse_cpus(_status(tree, "Cpus_allowed_list"))


def allowed_nodes(tree: Tree) -> frozenset[int]:
    """Return the nodes whose memory this process may use, as far as the kernel says (a container's cpuset)."""
    return parse_cpus(_status(tree, "Mems_allowed_list"))


def siblings(tree: Tree, cpu: int) -> frozenset[int]:
    """Return the CPUs of the core that *cpu* is a thread of."""
    return parse_cpus(tree.text(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or "") | {cpu}


def nodes_of(cpus: Set[int], known: dict[int, NumaNode]) -> frozenset[int]:
    """Return the nodes that some of *cpus* belong to."""
    return frozenset(number for number, node in known.items() if node.cpus & cpus)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the cores of a list such as "0-3,8,10-11"; what is none (see `is_list`) is left out."""
    cpus: set[int] = set()
    for word in text.split(","):
        if (ends := _ends(word)) is not None:
            cpus.update(range(ends[0], ends[1] + 1))
    return frozenset(cpus)


def is_list(text: str) -> bool:
    """Whether *text* is a list such as "0-3,8", of at least one core, without anything that `parse_cpus` leaves out."""
    return all(_ends(word) is not None for word in text.split(","))


def _ends(word: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", word, re.ASCII)
    if found is None:
        return None
    first, last = int(found[1]), int(found[2] or found[1])
    return (first, last) if first <= last < _MAX_CPUS else None


def format_cpus(cpus: Set[int]) -> str:
    """Return *cpus* as a list such as "0-3,8": the inverse of `parse_cpus`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _status(tree: Tree, name: str) -> str:
    for line in (tree.text("proc/self/status") or "").splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2]
    return ""
