"""The role of a node in the partitions of a plan: whether it pushes or owns them, and how much memory that takes."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..orchestration.codec import width_of
from ..orchestration.messages import NodeInfo, PartPlan, Plan, UnitPlan
from ..orchestration.placement.partition import ITEM_NBYTES
from ..pyx.direct import ANY_NBYTES, MOST_RANKS, channel_nbytes
from .generation import stored_nbytes
from .gpu_direct import GpuDirect
from .regions import page_round
from .transport import Link, wire


class PartitionRole:
    """What node *me* among *nodes* does for each partition, and how much memory that takes.

    *links* by node, which may change; *local*: the engine's sources of its ranks; *gpu_direct*: memory on a device.
    `lost`: the ranks that the job goes on without; `hit`: the nodes that had them.
    """

    def __init__(self, me: NodeInfo, nodes: Sequence[NodeInfo], links: Mapping[int, Link], local: Sequence[int],
                 gpu_direct: GpuDirect | None = None) -> None:
        self._me = me
        self._nodes = nodes
        self._links = links
        self._local = list(local)
        self._gpu_direct = gpu_direct
        self._members: dict[tuple[int, ...], Members] = {}  # by the ranks of units
        self.lost: frozenset[int] = frozenset()
        self.hit: list[int] = []

    def members_of(self, ranks: tuple[int, ...]) -> Members:
        """Return the members of a unit of *ranks*, except those that are lost."""
        if ranks not in self._members:
            self._members[ranks] = members_of(ranks, self._me, self._nodes, self._links, self._local, self.lost)
        return self._members[ranks]

    def lose(self, ranks: Collection[int]) -> None:
        """Go on without *ranks*: all that are lost by now."""
        self.lost = frozenset(ranks)
        self.hit = [node.index for node in self._nodes if not self.lost.isdisjoint(node.ranks)]
        self._members.clear()

    def has_lost(self, ranks: Collection[int]) -> bool:
        """Whether one of *ranks* (empty: all) is lost."""
        return bool(self.lost) and (not ranks or not self.lost.isdisjoint(ranks))

    @property
    def local_ranks(self) -> list[tuple[int, int]]:
        """The engine's source and the number of each rank here, lost ones included."""
        return list(zip(self._local, self._me.ranks))

    def appears_here(self, unit: UnitPlan, part: PartPlan) -> bool:
        """Whether the result of *part* is written into this node's memory."""
        if part.owner == self._me.index:
            return True
        return bool(self.members_of(unit.ranks).local) and wire(self._links[part.owner]) is not None

    def is_direct(self, unit: UnitPlan, part: PartPlan) -> bool:
        """Whether *part* goes directly between a rank's device and a card, if that device's memory has room."""
        return self._why_staged(unit, part) == ""

    def count_direct(self, unit: UnitPlan, parts: Sequence[PartPlan], found: Collection[int]) -> None:
        """Count *parts* of *unit*; those in *found* have places on a device. Log why the others have not."""
        for part in parts:
            reason = self._why_staged(unit, part)
            if self._gpu_direct is not None and reason is not None:
                no_room = "" if part.part in found else ("no piece of what the GPU shares is as large as the tensors "
                                                         "that are sent together")
                self._gpu_direct.count(unit, reason or no_room)

    def _why_staged(self, unit: UnitPlan, part: PartPlan) -> str | None:
        if self._gpu_direct is None or not self._gpu_direct.is_used:
            return None
        return self._gpu_direct.why_staged(unit, part, self._me.index, len(self.members_of(unit.ranks).local))

    def written_to(self, ranks: tuple[int, ...], part: PartPlan) -> tuple[int, ...]:
        """Return the nodes to which this one writes a partial or result of *part*, of *ranks*, over a wire."""
        members = self.members_of(ranks)
        if part.owner == self._me.index:
            return members.wired
        to_owner = members.local and wire(self._links[part.owner]) is not None
        return (part.owner,) if to_owner else ()

    def is_coded(self, unit: UnitPlan) -> bool:
        """Whether *unit* is compressed; within one node it never is."""
        return unit.codec is not None and len(self.members_of(unit.ranks).nodes) > 1

    def partial_nbytes(self, unit: UnitPlan, part: PartPlan) -> int:
        """Return the bytes of memory for this node's partial of *part*, which may need none."""
        local = self.members_of(unit.ranks).local
        if part.owner == self._me.index or not local:
            return 0
        if self.is_coded(unit):
            return part.wire_nbytes
        return part.nbytes if len(local) > 1 else 0

    def room(self, plan: Plan) -> dict[str, int]:
        """Return the bytes of memory that *plan* needs here, by the kinds of `Regions`."""
        room = dict.fromkeys(("result", "partial", "slot", "frame", "state", "store", "channel"), 0)
        for unit in plan.units:
            coded, members = self.is_coded(unit), self.members_of(unit.ranks)
            room["channel"] += page_round(self.channel_nbytes(unit))
            for part in unit.parts:
                is_owner = part.owner == self._me.index
                wire_nbytes = page_round(part.wire_nbytes if coded else part.nbytes)
                in_memory = self.appears_here(unit, part) and not self.is_direct(unit, part)
                room["result"] += 2 * page_round(part.nbytes) * in_memory
                room["partial"] += page_round(self.partial_nbytes(unit, part))
                room["slot"] += wire_nbytes * len(members.wired) * is_owner
                if coded and is_owner:
                    room["frame"] += 2 * wire_nbytes
                elif coded and self.appears_here(unit, part):
                    room["slot"] += 2 * wire_nbytes
                if is_owner and unit.unit == unit.store_unit:  # the first worker's, for all of them
                    room["store"] += page_round(stored_nbytes(unit, part))
                room["state"] += sum(page_round(nbytes) for nbytes in self.states_of(unit, part).values())
        return room

    def channel_nbytes(self, unit: UnitPlan) -> int:
        """Return the bytes of memory in which the ranks of *unit*, all of them here, sum it directly; 0: none.

        A unit without bytes is for calls of any size.
        """
        members = self.members_of(unit.ranks)
        if list(self._me.ranks) != sorted(self._me.ranks):
            return 0  # the engine combines inputs by local rank, ranks by rank: the bits would differ
        if (not unit.direct or members.nodes != (self._me.index,) or not 2 <= len(members.local) <= MOST_RANKS
                or any(part.owner != self._me.index for part in unit.parts)):
            return 0
        return channel_nbytes(len(members.local), unit.nbytes or ANY_NBYTES)

    def states_of(self, unit: UnitPlan, part: PartPlan) -> dict[str, int]:
        """Return the bytes of each state of *part* here, by its name in `PartCodec`."""
        if unit.codec is None or not self.is_coded(unit):
            return {}
        nbytes = part.nbytes // ITEM_NBYTES[unit.dtype] * width_of(unit.dtype)
        has_local = bool(self.members_of(unit.ranks).local)
        states = {"error": unit.codec.error_feedback and has_local, "momentum": unit.codec.momentum > 0 and has_local,
                  "error_back": unit.codec.error_feedback and part.owner == self._me.index}
        return {name: nbytes for name, is_here in states.items() if is_here}


@dataclass(frozen=True)
class Members:
    """The members of a unit. `nodes`: nodes with such ranks, in node order; `wired`: those reached over a wire;
    `local`: the engine's sources of such ranks here, in local-rank order."""

    n_ranks: int
    nodes: tuple[int, ...]
    wired: tuple[int, ...]
    local: tuple[int, ...]


def members_of(ranks: Sequence[int], me: NodeInfo, nodes: Sequence[NodeInfo], links: Mapping[int, Link],
               local: Sequence[int], lost: Collection[int] = ()) -> Members:
    """Return the members of a unit of *ranks* (empty: all) without *lost*; *local* are the sources of *me*'s ranks."""
    chosen = (set(ranks) if ranks else {rank for node in nodes for rank in node.ranks}) - set(lost)
    with_ranks = tuple(node.index for node in nodes if not chosen.isdisjoint(node.ranks))
    return Members(
        n_ranks=len(chosen), nodes=with_ranks,
        wired=tuple(index for index in with_ranks if wire(links.get(index)) is not None),
        local=tuple(source for source, rank in zip(local, me.ranks) if rank in chosen))
