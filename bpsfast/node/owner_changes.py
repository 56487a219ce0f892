"""Executes changes of owners on this node: which node sums a partition, and which nodes still need its last result.

Everything is prepared while the engine is frozen, before `Ready`; `begin` takes effect at the commit. The place where
ranks read results does not change: a new owner behind a wire writes them into this node's memory, as the lost one did;
results in the memory of a lost node of this host stay there, and the new owner writes there (`SharedMemoryTakeover`).

An owner that gives a partition up, to a node that has joined late, has sent its last result to all, and some nodes have
sent it inputs of the next round. All of that has to arrive first (`arrived`); then the links are unbound.
"""
from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..orchestration import messages
from ..orchestration.errors import ProtocolError
from ..orchestration.messages import Extent, PartPlan, Recover, UnitPlan
from ..orchestration.placement.partition import ROWS, round_after
from ..pyx.engine import NOBODY
from ..pyx.pages import Segment
from .dispatch import ResultResend
from .generation import Generation, UnitResources
from .redone_rounds import Dropped, RedoneRounds
from .regions import Place, Regions, page_round
from .transport import WireLink, wire
from .transport.shm import ShmLink
from .unit_installer import NodeParts, UnitInstaller, bind

#: How many missing rounds an error lists.
_N_NAMED = 4


class SharedMemoryTakeover:
    """The shared memory of a lost node of this host: it exists as long as a process has it mapped.

    The lost process does not write there any more: it is killed, if necessary, before the takeover. All nodes of this
    host read there. If one of them becomes the owner, it writes there; if a node behind a wire does, each of them
    receives its results there: the same bytes at the same place, and each tells its ranks once it has received them.
    """

    def __init__(self, link: ShmLink, regions: Regions) -> None:
        self._link = link
        self._regions = regions
        self._taken: dict[int, Segment] = {}

    def address(self, number: int) -> int:
        """Return the address of its segment *number*, mapped writable."""
        if number not in self._taken:
            segment = Segment.attach(os.dup(self._link.segments[number].fileno()), writable=True, populate=False)
            self._regions.adopt(segment)
            self._taken[number] = segment
        return self._taken[number].address


class OwnerTransfer:
    """Executes one `Recover` message. *unit_resources*: of committed units; *takeovers*: of lost nodes of this host.

    *dropped*: see `RedoneRounds`.
    """

    def __init__(self, parts: NodeParts, unit_resources: Mapping[int, UnitResources],
                 takeovers: Mapping[int, SharedMemoryTakeover], message: Recover, dropped: Dropped) -> None:
        self._me, self._engine, self._regions, self._links, self._sources, self._role, *_ = parts
        self._node_parts = parts
        self._unit_resources = unit_resources
        self._takeovers = takeovers
        self._message = message
        self._owned: list[tuple[messages.OwnerChange, dict[str, Any]]] = []
        self._followed: list[messages.OwnerChange] = []
        self._given_up: list[tuple[messages.OwnerChange, dict[str, Any] | None]] = []
        self._awaited: list[tuple[int, int, int]] = []  # (node, part, round) that is under way to this node
        self._left: list[tuple[int, int, list[int]]] = []  # (unit, part, nodes) of which nothing more comes
        self._redone = RedoneRounds(parts, unit_resources, message, dropped)
        #: Results that this node has to send to others after the commit.
        self.resends: list[ResultResend] = []

    def prepare(self, generation: Generation) -> None:
        """Allocate and bind; everything is recorded in *generation* at once. Raises `CapacityError`."""
        of = {each.part: each for each in self._message.owner_changes}
        changed = [(unit, part, of[part.part]) for unit in self._message.units for part in unit.parts
                   if part.part in of]
        made = UnitInstaller(self._node_parts, self._room([(unit, part) for unit, part, _ in changed]),
                            f"the change of owners in epoch {self._message.epoch}")
        for unit, part, change in changed:
            here = bool(self._role.members_of(unit.ranks).local)
            self._plan_release(unit, part, change, here)
            if change.giver == self._me.index and not here:
                self._given_up.append((change, None))
            if part.owner != self._me.index and not here:
                continue
            resources = generation.unit_resources.setdefault(unit.unit, UnitResources(ranks=unit.ranks))
            coded, lacks = self._role.is_coded(unit), self._me.index in change.lacking
            if coded:
                resources.codec, resources.dtype = unit.codec, unit.dtype
            if part.owner == self._me.index:
                outputs = (self._results_at(unit, part) if here
                           else made.by_parity(resources, self._regions.results, part.nbytes))
                arguments, _ = made.owned(unit, part, outputs, resources, round_after(change.kept_round))
                self._owned.append((change, arguments))
                resources.parts.append(part)
            elif change.giver == self._me.index:
                arguments = made.member(unit, part, self._results_at(unit, part), resources,
                                        round_after(change.kept_round), self._partial(unit, part))
                self._given_up.append((change, arguments))
            else:
                self._followed.append(change)
                if change.keeper != part.owner or not lacks:
                    self._expect(unit, part, part.owner, resources, coded, round_after(change.kept_round))
            if lacks and not change.lent:  # else it was told before, and may write already
                self._expect(unit, part, change.keeper, resources, coded, change.kept_round)
            if self._me.index == change.keeper and not change.lent:
                self._plan_resends(unit, part, change.kept_round, change.lacking, coded)
        self._prepare_keepers(generation)

    def _prepare_keepers(self, generation: Generation) -> None:
        """Bind, or plan to send, results that lost keepers have not sent."""
        places = {part.part: (unit, part) for unit in self._message.units for part in unit.parts}
        for each in self._message.keepers:
            unit, part = places[each.part]
            if self._me.index in each.lacking:
                resources = generation.unit_resources.setdefault(unit.unit, UnitResources(ranks=unit.ranks))
                self._expect(unit, part, each.keeper, resources, False, each.round)
            elif self._me.index == each.keeper:
                self._plan_resends(unit, part, each.round, each.lacking, False)

    @property
    def parts(self) -> set[int]:
        """The partitions whose owner changes."""
        return {each.part for each in self._message.owner_changes}

    @property
    def given_up(self) -> set[int]:
        """The partitions that living owners give up: once all has `arrived`, nothing of them is under way."""
        return {each.part for each in self._message.owner_changes if each.giver >= 0}

    @property
    def forgotten(self) -> set[int]:
        """The partitions of which earlier writes must not be repeated over another link."""
        return self.given_up | self.rounds_sent_again.keys()

    @property
    def rounds_sent_again(self) -> dict[int, int]:
        """See `RedoneRounds`."""
        return self._redone.rounds_sent_again

    @property
    def arrived(self) -> bool:
        """Whether all has arrived that was under way between this node and owners that give up, and the engine knows.

        What the engine learns after the commit would be dropped if the former owner is lost by then, or, if that owns
        the partition again, be mistaken for a repeated write.
        """
        self._awaited = [(node, part, round_) for node, part, round_ in self._awaited
                         if self._wire(node).next_round(part) == round_
                         or not self._engine.was_told(part, self._sources[node], round_)]
        return self._redone.arrived and not self._awaited

    @property
    def missing(self) -> str:
        """A list, for errors, of what had not arrived at the last call of `arrived`: rounds, partitions and nodes."""
        names = {part.part: unit.name for unit in self._message.units for part in unit.parts}
        told = [f"round {round_} of partition {part} of {names[part]!r} from node {node}"
                for node, part, round_ in self._awaited] + self._redone.missing
        return ", ".join(told[:_N_NAMED]) + (f" and {len(told) - _N_NAMED} more" if len(told) > _N_NAMED else "")

    def begin(self) -> None:
        """Tell the engine, which is frozen, of lost ranks and new owners. After the dispatcher."""
        self._redone.begin()
        for each in self._message.keepers:
            if self._me.index in each.lacking:
                self._engine.set_keeper(each.part, self._sources[each.keeper])
        for change, member in self._given_up:
            if member is None:
                self._engine.give_up(change.part, change.kept_round)
            else:
                self._engine.add_member(change.part, **member, kept_round=change.kept_round)
        for number, part, nodes in self._left:
            resources = self._unit_resources[number]
            for node in nodes:
                self._wire(node).unbind(part)
                resources.bound.remove((node, part))
            if nodes:
                resources.give_up(part)
        for change, arguments in self._owned:
            self._engine.add_owned(change.part, **arguments, kept_round=change.kept_round)
        for change in self._followed:
            keeper = self._sources[change.keeper] if self._me.index in change.lacking else NOBODY
            self._engine.follow(change.part, self._sources[change.owner], change.kept_round, keeper)

    def _wire(self, node: int) -> WireLink:
        link = wire(self._links[node])
        assert link is not None, "an owner that gives up shares no memory with nodes that push"
        return link

    def _plan_release(self, unit: UnitPlan, part: PartPlan, change: messages.OwnerChange, here: bool) -> None:
        """Record what has to arrive until nothing of *part* is under way, and which nodes are unbound then."""
        if change.giver == self._me.index:
            nodes = [node for node in self._role.members_of(unit.ranks).nodes if node != self._me.index]
            self._awaited += [(node, part.part, round_after(change.kept_round)) for node in change.pushed]
            self._left.append((unit.unit, part.part, nodes))
        elif change.giver >= 0 and here:
            if self._me.index in change.lacking:
                self._awaited.append((change.giver, part.part, change.kept_round))
            self._left.append((unit.unit, part.part, [change.giver]))

    def _partial(self, unit: UnitPlan, part: PartPlan) -> Place | None:
        """Return where the partial of this node lay before it owned *part*; None if it has always owned it."""
        return self._unit_resources[unit.unit].partials.get(part.part)

    def _room(self, changed: list[tuple[UnitPlan, PartPlan]]) -> dict[str, int]:
        """Return the bytes to be allocated here, by the kinds of `Regions`, for new owners and new members."""
        room = dict.fromkeys(("result", "partial", "slot", "frame", "state", "store", "channel"), 0)
        givers = {each.part: each.giver for each in self._message.owner_changes}
        for unit, part in changed:
            if givers[part.part] == self._me.index and not self._partial(unit, part):
                room["partial"] += page_round(self._role.partial_nbytes(unit, part))
            if part.owner != self._me.index:
                continue
            coded, members = self._role.is_coded(unit), self._role.members_of(unit.ranks)
            wire_nbytes = page_round(part.wire_nbytes if coded else part.nbytes)
            room["result"] += 0 if members.local else 2 * page_round(part.nbytes)
            room["slot"] += wire_nbytes * len(members.wired)
            room["frame"] += 2 * wire_nbytes * coded
        return room

    def _expect(self, unit: UnitPlan, part: PartPlan, node: int, resources: UnitResources, coded: bool,
                round_: int) -> None:
        """Expect results of *part* from *node* from *round_* on, if it is reached over a wire."""
        link = wire(self._links[node])
        if link is not None:
            bind(resources, link, unit, part, self._arriving_at(unit, part), coded, round_)

    def _arriving_at(self, unit: UnitPlan, part: PartPlan) -> tuple[int, int]:
        """Return the addresses, by parity, where the owner writes results of *part*; frames if it is compressed."""
        known = self._unit_resources[unit.unit].arriving.get(part.part)
        return known if known is not None else self._results_at(unit, part)

    def _results_at(self, unit: UnitPlan, part: PartPlan) -> tuple[int, int]:
        """Return the addresses, by parity, where ranks of this node read results of *part*."""
        extent = self._unit_resources[unit.unit].extents[part.part]
        begin = self._begin_of(extent)
        return begin + extent.offset_even, begin + extent.offset_odd

    def _begin_of(self, extent: Extent) -> int:
        if extent.node == self._me.index:
            return self._regions.chunk(extent.segment).segment.address
        if extent.node not in self._takeovers:
            raise ProtocolError(f"results lie in the memory of node {extent.node}, which is not lost: a bug of bpsfast")
        return self._takeovers[extent.node].address(extent.segment)

    def _plan_resends(self, unit: UnitPlan, part: PartPlan, round_: int, lacking: Sequence[int], coded: bool) -> None:
        address = self._arriving_at(unit, part)[round_ & 1]
        nbytes = part.nbytes
        if coded or unit.op == ROWS:  # a frame: its first eight bytes say how many follow
            nbytes = ctypes.c_uint64.from_address(address).value + 8
        self.resends += [ResultResend(self._sources[node], part.part, round_, address, nbytes) for node in lacking]
