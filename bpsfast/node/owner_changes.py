"""What becomes here of partitions that get another owner: who sums them, and what is owed of the last round.

Prepared whole before anybody is told `Ready`, while the engine is frozen; `begin` at the commit. Where ranks read
results does not change: an owner behind a wire writes them into this node's memory, as the lost one did; and what was
read in the memory of a lost node of this host is read there still, and written there by the new owner (`SharedMemoryTakeover`).

An owner that lives and gives a partition up, to a node that has come late, has sent its last result to all, and some
have sent it inputs of the next round. All of that has to arrive first (`arrived`); what it came by is unbound then.
"""
from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any

from ..orchestration import messages
from ..orchestration.errors import ProtocolError
from ..orchestration.messages import Extent, NodeInfo, PartPlan, Recover, UnitPlan
from ..orchestration.placement.partition import ROWS, round_after
from ..pyx.engine import NOBODY, Engine
from ..pyx.pages import Segment
from .dispatch import ResultResend
from .generation import Generation, UnitResources
from .partition_role import PartitionRole
from .regions import Place, Regions, page_round
from .transport import Link, WireLink, wire
from .transport.shm import ShmLink
from .unit_installer import UnitInstaller, bind

#: Of what has not come an error names so many.
_N_NAMED = 4


class SharedMemoryTakeover:
    """The memory that a lost node of this host has left: it lasts for as long as somebody has it mapped.

    The lost process writes there no more: it was killed, if it was not dead, before anything is taken over. Members
    near it all read there. One that becomes the owner writes there; if a node behind a wire does, each of them receives
    its results there: the same bytes at the same place, and none tells its ranks before they have come to itself.
    """

    def __init__(self, link: ShmLink, regions: Regions) -> None:
        self._link = link
        self._regions = regions
        self._taken: dict[int, Segment] = {}

    def address(self, number: int) -> int:
        """Return where its segment *number* begins here, to be written to."""
        if number not in self._taken:
            segment = Segment.attach(os.dup(self._link.segments[number].fileno()), writable=True, populate=False)
            self._regions.adopt(segment)
            self._taken[number] = segment
        return self._taken[number].address


class Succession:
    """One `Recover`, carried out. Parameters are those of `PlanInstaller`, which makes it; *holdings*: of committed units."""

    def __init__(self, me: NodeInfo, engine: Engine, links: Mapping[int, Link], sources: Mapping[int, int],
                 partition_role: PartitionRole, unit_resources: Mapping[int, UnitResources], regions: Regions, takeovers: Mapping[int, SharedMemoryTakeover],
                 message: Recover) -> None:
        self._me = me
        self._engine = engine
        self._links = links
        self._sources = sources
        self._partition_role = partition_role
        self._unit_resources = unit_resources
        self._regions = regions
        self._takeovers = takeovers
        self._message = message
        self._owned: list[tuple[messages.OwnerChange, dict[str, Any]]] = []
        self._followed: list[messages.OwnerChange] = []
        self._given_up: list[tuple[messages.OwnerChange, dict[str, Any] | None]] = []
        self._awaited: list[tuple[int, int, int]] = []  # (node, part, round) that is on its way to here
        self._left: list[tuple[int, int, list[int]]] = []  # (unit, part, nodes) that nothing more comes from
        #: What this node has to send others once the commit has come.
        self.resends: list[ResultResend] = []

    def prepare(self, generation: Generation, unit_installer: Callable[[dict[str, int], str], UnitInstaller]) -> None:
        """Allocate and bind; what is used is noted in *generation* at once. Raises `CapacityError`."""
        of = {each.part: each for each in self._message.owner_changes}
        changed = [(unit, part, of[part.part]) for unit in self._message.units for part in unit.parts
                   if part.part in of]
        made = unit_installer(self._room([(unit, part) for unit, part, _ in changed]),
                            f"the succession in epoch {self._message.epoch}")
        for unit, part, succession in changed:
            here = bool(self._partition_role.members_of(unit.ranks).local)
            self._part_from(unit, part, succession, here)
            if succession.giver == self._me.index and not here:
                self._given_up.append((succession, None))
            if part.owner != self._me.index and not here:
                continue
            resources = generation.unit_resources.setdefault(unit.unit, UnitResources(ranks=unit.ranks))
            coded, lacks = self._partition_role.is_coded(unit), self._me.index in succession.lacking
            if coded:
                resources.codec, resources.dtype = unit.codec, unit.dtype
            if part.owner == self._me.index:
                outputs = self._results_at(unit, part) if here else made.results(part, resources)
                arguments, _ = made.owned(unit, part, outputs, resources, round_after(succession.kept_round))
                self._owned.append((succession, arguments))
                resources.parts.append(part)
            elif succession.giver == self._me.index:
                arguments = made.member(unit, part, self._results_at(unit, part), resources,
                                        round_after(succession.kept_round), self._partial(unit, part))
                self._given_up.append((succession, arguments))
            else:
                self._followed.append(succession)
                if succession.keeper != part.owner or not lacks:
                    self._expect(unit, part, part.owner, resources, coded, round_after(succession.kept_round))
            if lacks and not succession.lent:  # else it may write already, and maybe has
                self._expect(unit, part, succession.keeper, resources, coded, succession.kept_round)
            if self._me.index == succession.keeper and not succession.lent:
                self._plan_resends(unit, part, succession, coded)

    @property
    def parts(self) -> set[int]:
        """The partitions that change hands."""
        return {each.part for each in self._message.owner_changes}

    @property
    def given_up(self) -> set[int]:
        """The partitions that owners give up who live: once it has `arrived`, nothing of them is on any wire."""
        return {each.part for each in self._message.owner_changes if each.giver >= 0}

    @property
    def arrived(self) -> bool:
        """Whether all has come that was on its way between owners that give up, and this node, and the engine knows.

        What the engine is told of after the commit would be dropped if the giver is lost by then, or, if that owns the
        partition again, be taken for what is sent once more.
        """
        self._awaited = [(node, part, round_) for node, part, round_ in self._awaited
                         if self._wire(node).next_round(part) == round_
                         or not self._engine.was_told(part, self._sources[node], round_)]
        return not self._awaited

    @property
    def missing(self) -> str:
        """What had not come when `arrived` was asked last, in words: of whom, of which partitions, which round."""
        names = {part.part: unit.name for unit in self._message.units for part in unit.parts}
        told = [f"round {round_} of partition {part} of {names[part]!r} from node {node}"
                for node, part, round_ in self._awaited]
        return ", ".join(told[:_N_NAMED]) + (f" and {len(told) - _N_NAMED} more" if len(told) > _N_NAMED else "")

    def begin(self) -> None:
        """Let the engine go on with the new owners; it is frozen. The dispatcher knows them already."""
        for succession, member in self._given_up:
            if member is None:
                self._engine.give_up(succession.part, succession.kept_round)
            else:
                self._engine.add_member(succession.part, **member, kept_round=succession.kept_round)
        for number, part, nodes in self._left:
            resources = self._unit_resources[number]
            for node in nodes:
                self._wire(node).unbind(part)
                resources.bound.remove((node, part))
            if nodes:
                resources.give_up(part)
        for succession, arguments in self._owned:
            self._engine.add_owned(succession.part, **arguments, kept_round=succession.kept_round)
        for succession in self._followed:
            keeper = self._sources[succession.keeper] if self._me.index in succession.lacking else NOBODY
            self._engine.follow(succession.part, self._sources[succession.owner], succession.kept_round, keeper)

    # -- innards ------------------------------------------------------------------------------------------

    def _wire(self, node: int) -> WireLink:
        link = wire(self._links[node])
        assert link is not None, "who gives up shares no memory with those who push"
        return link

    def _part_from(self, unit: UnitPlan, part: PartPlan, succession: messages.OwnerChange, here: bool) -> None:
        """Note what has to arrive before nothing of *part* is under way, and between whom nothing is from then on."""
        if succession.giver == self._me.index:
            nodes = [node for node in self._partition_role.members_of(unit.ranks).nodes if node != self._me.index]
            self._awaited += [(node, part.part, round_after(succession.kept_round)) for node in succession.pushed]
            self._left.append((unit.unit, part.part, nodes))
        elif succession.giver >= 0 and here:
            if self._me.index in succession.lacking:
                self._awaited.append((succession.giver, part.part, succession.kept_round))
            self._left.append((unit.unit, part.part, [succession.giver]))

    def _partial(self, unit: UnitPlan, part: PartPlan) -> Place | None:
        """Return where the sum of this node's ranks lay when it owned *part* not yet, if it did not always."""
        return self._unit_resources[unit.unit].partials.get(part.part)

    def _room(self, changed: list[tuple[UnitPlan, PartPlan]]) -> dict[str, int]:
        """Return the bytes to be allocated here, by the kinds of `Regions`: what a new owner needs, or a new member.
        """
        room = dict.fromkeys(("result", "partial", "slot", "frame", "state", "store"), 0)
        givers = {each.part: each.giver for each in self._message.owner_changes}
        for unit, part in changed:
            if givers[part.part] == self._me.index and not self._partial(unit, part):
                room["partial"] += page_round(self._partition_role.partial_nbytes(unit, part))
            if part.owner != self._me.index:
                continue
            coded, members = self._partition_role.is_coded(unit), self._partition_role.members_of(unit.ranks)
            wire_nbytes = page_round(part.wire_nbytes if coded else part.nbytes)
            room["result"] += 0 if members.local else 2 * page_round(part.nbytes)
            room["slot"] += wire_nbytes * len(members.wired)
            room["frame"] += 2 * wire_nbytes * coded
        return room

    def _expect(self, unit: UnitPlan, part: PartPlan, node: int, resources: UnitResources, coded: bool, round_: int) -> None:
        """Let *node* write results of *part* from *round_* on, if it is reached over a wire."""
        link = wire(self._links[node])
        if link is not None:
            bind(resources, link, unit, part, self._arriving_at(unit, part), coded, round_)

    def _arriving_at(self, unit: UnitPlan, part: PartPlan) -> tuple[int, int]:
        """Return where results of *part* are written by their owner, by parity: they are frames if it is compressed."""
        known = self._unit_resources[unit.unit].arriving.get(part.part)
        return known if known is not None else self._results_at(unit, part)

    def _results_at(self, unit: UnitPlan, part: PartPlan) -> tuple[int, int]:
        """Return where ranks of this node read results of *part*, by parity."""
        extent = self._unit_resources[unit.unit].extents[part.part]
        begin = self._begin_of(extent)
        return begin + extent.offset_even, begin + extent.offset_odd

    def _begin_of(self, extent: Extent) -> int:
        if extent.node == self._me.index:
            return self._regions.chunk(extent.segment).segment.address
        if extent.node not in self._takeovers:
            raise ProtocolError(f"results lie in the memory of node {extent.node}, which is not lost: our bug")
        return self._takeovers[extent.node].address(extent.segment)

    def _plan_resends(self, unit: UnitPlan, part: PartPlan, succession: messages.OwnerChange, coded: bool) -> None:
        address = self._arriving_at(unit, part)[succession.kept_round & 1]
        nbytes = part.nbytes
        if coded or unit.op == ROWS:  # a frame: its first eight bytes say how many follow
            nbytes = ctypes.c_uint64.from_address(address).value + 8
        self.resends += [ResultResend(self._sources[node], part.part, succession.kept_round, address, nbytes)
                       for node in succession.lacking]
