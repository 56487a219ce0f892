"""Takes lost ranks out of this node's sums, and has rounds summed again that were complete in part with their inputs.

`orchestration/job/recovery.py` decides which (`Redo`). Before a node answers `Ready`, everything of these rounds that
was under way between living nodes has arrived, and is dropped (`arrived`): a result, or a partial with the input of a
lost rank. Then its slots expect the round once more. At the commit (`begin`) the inputs of lost ranks leave the engine,
and words of the board go back.
"""
from __future__ import annotations

from collections.abc import Mapping

from ..orchestration.messages import PartPlan, Recover, Redo
from ..orchestration.placement.partition import round_after
from .generation import UnitResources
from .transport import wire
from .unit_installer import NodeParts

#: (node, partition, round) that a node has sent, and that does not count.
Dropped = set[tuple[int, int, int]]


class RedoneRounds:
    """Executes the `redone` of one `Recover` message. *unit_resources*: of committed units.

    *dropped*: what changes of epoch that were not committed have dropped already; it is added to.
    """

    def __init__(self, parts: NodeParts, unit_resources: Mapping[int, UnitResources], message: Recover,
                 dropped: Dropped) -> None:
        self._me, self._engine, _, self._links, self._sources, self._role, *_ = parts
        self._unit_resources = unit_resources
        self._dropped = dropped
        #: The partitions here of units with lost ranks, as they were before the change.
        self._here: dict[int, tuple[UnitResources, PartPlan]] = {
            part.part: (resources, part) for resources in unit_resources.values()
            if self._role.has_lost(resources.ranks) for part in resources.parts}
        self._redone = [redo for redo in message.redone if redo.part in self._here]
        self._awaited = [(sender, redo.part, round_) for redo in self._redone
                         for to, sender, round_ in redo.stale if to == self._me.index]
        self._is_expecting = False

    @property
    def rounds_sent_again(self) -> dict[int, int]:
        """By partition, the round of which this node sends a result or a partial that it has sent before."""
        return {redo.part: round_after(redo.kept_round) for redo in self._redone if self._sums_again(redo)}

    def _sums_again(self, redo: Redo) -> bool:
        is_owner = self._here[redo.part][1].owner == self._me.index
        return redo.was_sent if is_owner else self._me.index in redo.again

    @property
    def arrived(self) -> bool:
        """Whether all has arrived, and was dropped, that does not count; what comes after it does."""
        self._awaited = [each for each in self._awaited if not self._has_dropped(each)]
        if not self._awaited and not self._is_expecting:
            self._is_expecting = True
            for redo in self._redone:
                self._expect_again(redo)
        return not self._awaited

    def _expect_again(self, redo: Redo) -> None:
        """Let those that send the round of *redo* again write it, once all nodes are ready."""
        owner = self._here[redo.part][1].owner
        is_member = self._me.index not in redo.leaving and redo.was_sent
        for node in redo.again if owner == self._me.index else (owner,) if is_member else ():
            link = wire(self._links[node])
            if link is not None and redo.part in link.bound:
                self._dropped.add((node, redo.part, round_after(redo.kept_round)))
                link.bind(redo.part, *link.bound[redo.part], first_round=round_after(redo.kept_round))

    def _has_dropped(self, each: tuple[int, int, int]) -> bool:
        if each in self._dropped:
            return True
        node, part, round_ = each
        link = wire(self._links[node])
        if (link is not None and link.next_round(part) == round_) or not self._engine.has_come(
                part, self._sources[node], round_):
            return False
        self._engine.drop_early(part, self._sources[node], round_)
        self._dropped.add(each)
        return True

    @property
    def missing(self) -> list[str]:
        """What had not arrived at the last call of `arrived`, for errors."""
        return [f"round {round_} of partition {part} of {self._here[part][0].names[0]!r} from node {node}"
                for node, part, round_ in self._awaited]

    def begin(self) -> None:
        """Take lost ranks out of the engine, which is frozen, and let it go back. After the dispatcher, and before
        partitions change owners."""
        gone = {number for number, (resources, part) in self._here.items() if not self._leave(resources, part)}
        for resources in self._unit_resources.values() if gone else ():
            resources.parts = [part for part in resources.parts if part.part not in gone]
        for redo in self._redone:
            if redo.part in gone:
                continue
            self._engine.redo(redo.part, redo.kept_round, self._sums_again(redo))
            if self._here[redo.part][1].owner == self._me.index:
                for node in redo.again:
                    self._engine.await_again(redo.part, self._sources[node])

    def _leave(self, resources: UnitResources, part: PartPlan) -> bool:
        """Take lost ranks out of *part*; return whether this node still has inputs of it."""
        members = self._role.members_of(resources.ranks)
        if resources.is_average and part.owner == self._me.index:
            self._engine.set_divisor(part.part, members.n_ranks)
        lost = [source for source, rank in self._role.local_ranks if rank in self._role.lost]
        lost += [self._sources[node] for node in self._role.hit if node in self._sources and node not in members.nodes]
        for source in lost:
            if not self._engine.lose_input(part.part, source):
                for node in [node for node, number in resources.bound if number == part.part]:  # owner, and keeper
                    link = wire(self._links[node])
                    assert link is not None, "bytes are written over it"
                    link.unbind(part.part)
                resources.bound = [bound for bound in resources.bound if bound[1] != part.part]
                return False
        return True
