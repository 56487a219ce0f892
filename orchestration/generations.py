"""Placement, partitions and order change in generations only: planned, prepared by all, committed by all. Pure."""
from __future__ import annotations

from collections.abc import Sequence

from .credit_queue import rank_parts
from .layout import lay_out
from .messages import Commit, NodeInfo, Plan, TensorSpec, UnitPlan
from .placement import assign
from .rates import bound_remark, bounded, machines_of, ownable


class Generations:
    """The committed units and at most one generation in flight.

    Generation, unit and partition numbers are used once: those of a generation that failed stay unused, so that a late
    word about it cannot be taken for another's.

    Raises ConfigError if *policy* cannot place anything on *nodes*.
    """

    def __init__(self, nodes: Sequence[NodeInfo], *, policy: str, partition_nbytes: int, fusion_nbytes: int) -> None:
        self._nodes = nodes
        self._machines = machines_of(nodes)
        self._policy = policy
        self._partition_nbytes = partition_nbytes
        self._fusion_nbytes = fusion_nbytes
        self._page_nbytes = max(node.page_nbytes for node in nodes)
        self._owned = [0] * len(nodes)
        self._more = ownable(nodes)
        self._next_unit = 0
        self._next_part = 0
        self._ready: set[int] = set()
        self.number = 0
        self.units: list[UnitPlan] = []
        self.in_flight: Plan | None = None
        assign([1], self._machines, policy)

    def know(self, nodes: Sequence[NodeInfo]) -> None:
        """Count on *nodes*, the same ones with other rates, from the next generation on."""
        self._machines = machines_of(nodes)

    def propose(self, specs: Sequence[TensorSpec]) -> Plan:
        """Begin the next generation with *specs*, which carry their priorities. None may be in flight.

        Raises CapacityError or UnsupportedError, and then nothing has begun.
        """
        assert self.in_flight is None, f"generation {self.number} is in flight"
        units = lay_out(
            specs, self._machines, policy=self._policy, partition_nbytes=self._partition_nbytes,
            fusion_nbytes=self._fusion_nbytes, page_nbytes=self._page_nbytes, owned=self._owned, more=self._more,
            first_unit=self._next_unit, first_part=self._next_part)
        nbytes = sum(self._owned) + sum(unit.nbytes for unit in units)
        remark = ""
        if self._policy == "optimal":
            machines = bounded(self._machines, self._owned, self._more)
            remark = bound_remark(self._nodes, self._machines, machines, nbytes)
        self.number += 1
        self._next_unit += len(units)
        self._next_part += sum(len(unit.parts) for unit in units)
        self._ready = set()
        self.in_flight = Plan(generation=self.number, units=tuple(units), remark=remark)
        return self.in_flight

    def can_own(self, node: int, more_nbytes: int) -> None:
        """Note how many bytes of later generations *node* can own, -1 if its memory is not bounded."""
        self._more[node] = more_nbytes

    def ready(self, node: int, generation: int) -> Commit | None:
        """Note that *node* has prepared *generation*; return the commit if it was the last. Late words are ignored."""
        if self.in_flight is None or generation != self.number:
            return None
        self._ready.add(node)
        if len(self._ready) < len(self._machines):
            return None
        self.units += self.in_flight.units
        for unit in self.in_flight.units:
            for part in unit.parts:
                self._owned[part.owner] += part.nbytes
        self.in_flight = None
        return Commit(generation=generation, order=tuple(rank_parts(self.units)))

    def abandon(self, generation: int) -> list[str]:
        """Drop *generation*, which some node cannot prepare; return its tensors' names, [] if it is not in flight."""
        if self.in_flight is None or generation != self.number:
            return []
        names = [member.name for unit in self.in_flight.units for member in unit.members]
        self.in_flight = None
        return names

    def not_ready(self, name: str) -> list[int]:
        """Return the nodes that still prepare the generation with tensor *name*, [] if it is not in flight."""
        units = self.in_flight.units if self.in_flight is not None else ()
        if not any(member.name == name for unit in units for member in unit.members):
            return []
        return [node for node in range(len(self._machines)) if node not in self._ready]
