"""A helper is lost, or has come: which round of what changes hands is kept, and who can sum it from now on. Pure.

What a step's truth is made of lies with the ranks until its result has been read (docs/design/recovery.md),
so nothing is rolled back. Of each partition that the lost one owned the survivors say which round they passed on last,
and which is complete with them. Rounds are synchronous: nobody begins one before the one before is complete with
it, and nobody completes one that somebody has not passed on. So if the latest complete round anywhere is k,

    complete with a node    k, or k - 1: then it lacks the result of k, which a node that has it sends it: it is kept
    passed on by a node     k, or k + 1: then it passes that on again, to the new owner, from where its inputs still are

and all who are left go on with the bits that an undisturbed job has.

What newcomers are given had an owner that lives. Then k is its own round, it has sent that result to all, and holds
whatever was passed on to it of the next one: that arrives, and is dropped, before anything changes hands.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import BpsError, PeerLostError, ProtocolError
from ..messages import FreezeReport, Message, NodeInfo, OwnerChange, PartPlan, UnitPlan
from ..placement.partition import rounds_ahead
from ..roster import Roster


class EpochChange:
    """One change of epoch under way: who has stopped, then who is ready for the new owners.

    Parameters
    ----------
    lost, survivors
        Node indices: who is lost since the last epoch, and who is to take part.
    deadline
        When to give up, on the job's clock.
    joined
        Survivors that are to get their share; then nobody is lost.
    """

    def __init__(self, epoch: int, lost: Collection[int], survivors: Collection[int], reason: str, deadline: float,
                 joined: Collection[int] = ()) -> None:
        self.epoch = epoch
        self.lost = frozenset(lost)
        self.joined = frozenset(joined)
        self.reason = reason
        self.deadline = deadline
        self.generation = 0
        self.units: Sequence[UnitPlan] = ()  # with their new owners
        self.owner_changes: Sequence[OwnerChange] = ()
        self._survivors = frozenset(survivors)
        self._reports: dict[int, FreezeReport] = {}
        self._ready: set[int] = set()

    def frozen(self, node: int, message: FreezeReport) -> bool:
        """Take the word of *node* that it has stopped; whether it was the last. Late words are ignored."""
        if message.epoch != self.epoch or self.generation:
            return False
        self._reports[node] = message
        return self._reports.keys() >= self._survivors

    def ready(self, node: int, generation: int) -> bool:
        """Take the word of *node* that it is prepared; whether it was the last. Late words are ignored."""
        if not self.generation or generation != self.generation:
            return False
        self._ready.add(node)
        return self._ready >= self._survivors

    @property
    def missing(self) -> list[int]:
        """The nodes that have not answered."""
        return sorted(self._survivors - (self._ready if self.generation else self._reports.keys()))

    def moves_of_lost(self, units: Sequence[UnitPlan], nodes: Sequence[NodeInfo], lent: Mapping[int, OwnerChange]
                      ) -> list[PartitionMove]:
        """Return, of each partition of *units* that a lost node owned, what was done and who can own it.

        *lent*, by partition: of the last changes those with a round that some nodes lacked.

        Raises
        ------
        PeerLostError
            If nobody can go on with one of them.
        ProtocolError
            If what nodes say contradicts what they can have done.
        """
        helpers = [node.index for node in nodes if not node.ranks and node.index in self._survivors]
        near = self._near
        return [_heir(unit, part, done, helpers, near, lent.get(part.part))
                for unit, part, done in self._told(units, nodes, lambda unit, part: part.owner in self.lost)]

    def moves_to_joined(self, units: Sequence[UnitPlan], nodes: Sequence[NodeInfo], lent: Mapping[int, OwnerChange]
                ) -> list[PartitionMove]:
        """Return, of each partition of *units* that its owner can give up to who has joined, what was done.

        What owners keep more of than sums stays with them, and what is compressed; and what others read in the owner's
        memory, or would read in the new one's. So does what somebody still awaits from another node than the owner, by
        *lent* (as in `moves_of_lost`).

        Raises
        ------
        ProtocolError
            If what nodes say contradicts what they can have done.
        """
        near = self._near
        found = [_gift(part.owner, unit, part, done, sorted(self.joined), near, lent.get(part.part))
                 for unit, part, done in self._told(units, nodes, lambda unit, part: is_plain(unit), with_owner=True)]
        return [heir for heir in found if heir.candidates]

    @property
    def _near(self) -> dict[int, set[int]]:
        return {node: set(report.near) for node, report in self._reports.items()}

    def _told(self, units: Sequence[UnitPlan], nodes: Sequence[NodeInfo],
              is_wanted: Callable[[UnitPlan, PartPlan], bool], with_owner: bool = False
              ) -> Iterator[tuple[UnitPlan, PartPlan, dict[int, _Progress]]]:
        """Yield the partitions that are wanted, with the words of those who push them, and of the owner if asked for.
        """
        said = {node: {part: _Progress(*rest) for part, *rest in report.progress}
                for node, report in self._reports.items()}
        for unit in units:
            ranks = set(unit.ranks)
            members = [node.index for node in nodes if node.ranks and (not ranks or ranks & set(node.ranks))]
            for part in unit.parts:
                if not is_wanted(unit, part):
                    continue
                asked = [*members, *([part.owner] if with_owner and part.owner not in members else [])]
                unheard = [node for node in asked if part.part not in said.get(node, {})]
                if unheard:
                    raise ProtocolError(f"nodes {unheard} say nothing of partition {part.part} of {unit.name!r}, which "
                                        "their ranks push, or which they own")
                yield unit, part, {node: said[node][part.part] for node in asked}


def is_plain(unit: UnitPlan) -> bool:
    """Whether owners of *unit* keep no more of it than sums, and those not compressed: then they can give it up."""
    return unit.codec is None and unit.store is None


class PartitionMove:
    """A partition that is to have a new owner: `candidates` for it, and all else of its `OwnerChange`."""

    def __init__(self, unit: UnitPlan, part: PartPlan, candidates: Sequence[int], kept_round: int, keeper: int,
                 lacking: Sequence[int], lent: bool, giver: int = -1, pushed: Sequence[int] = ()) -> None:
        self.unit = unit
        self.part = part
        self.candidates = list(candidates)
        self.kept_round = kept_round
        self.keeper = keeper
        self.lacking = tuple(lacking)
        self.lent = lent
        self.giver = giver
        self.pushed = tuple(pushed)

    def succession(self, owner: int) -> OwnerChange:
        """Return how *owner* takes over."""
        return OwnerChange(part=self.part.part, owner=owner, kept_round=self.kept_round, keeper=self.keeper,
                          lacking=self.lacking, lent=self.lent, giver=self.giver, pushed=self.pushed)


class _Progress(NamedTuple):
    """One node's word on one partition, as in `FreezeReport`."""

    passed_on: int
    complete: int
    place: int


def _heir(unit: UnitPlan, part: PartPlan, done: Mapping[int, _Progress], helpers: Sequence[int],
          near: Mapping[int, set[int]], before: OwnerChange | None) -> PartitionMove:
    """Return who can own *part*, of which *done* tells by member; *before*: what was lent when it was last inherited.
    """
    kept = next(iter(done.values())).complete
    for each in done.values():
        kept = each.complete if rounds_ahead(each.complete, kept) > 0 else kept
    _check(unit, part, done, kept)
    holders = [node for node, each in done.items() if each.complete == kept]
    behind = [node for node in done if node not in holders]
    # Who reads results where the lost owner or a holder does has this one in place, and was only not told.
    in_place = {part.owner, *(done[node].place for node in holders)}
    lacking = [node for node in behind if done[node].place not in in_place]
    # What is under way still must not be sent again: it would come when others have written there what follows.
    lent = before is not None and before.kept_round == kept and set(lacking) <= set(before.lacking) and lacking != []
    keepers = [before.keeper] if before is not None and lent else [
        node for node in holders if not near[node] & set(lacking)]
    if lacking and not keepers:
        raise PeerLostError(f"the result of round {kept} of partition {part.part} of {unit.name!r} cannot reach nodes "
                            f"{lacking} from nodes {holders}, with which they share memory")
    candidates = [node for node in holders if _reaches(node, done, near)] if unit.codec is None else []
    if unit.codec is None or all(each.place != part.owner for each in done.values()):
        candidates += [node for node in helpers if not any(node in near[member] for member in done)]
    if not candidates:
        why = (" (it is compressed, and no helper is left)" if unit.codec is not None
               else " (some nodes read results where the lost one has put them, others do not)")
        raise PeerLostError(f"nobody can go on with partition {part.part} of {unit.name!r}{why}")
    return PartitionMove(unit, part, candidates, kept, keepers[part.part % len(keepers)] if lacking else -1,
                         lacking, lent)


def _gift(giver: int, unit: UnitPlan, part: PartPlan, done: Mapping[int, _Progress], joined: Sequence[int],
          near: Mapping[int, set[int]], before: OwnerChange | None) -> PartitionMove:
    """Return who of *joined* can own *part*, which *giver* owns and lives; *done*: by member, and of *giver*; *before*:
    as in `_heir`.
    """
    kept = done[giver].complete
    _check(unit, part, done, kept)
    members = {node: each for node, each in done.items() if each.place >= 0}
    others = {node: each for node, each in members.items() if node != giver}
    is_read_there = any(each.place == giver or giver in near[node] for node, each in others.items())
    candidates = [node for node in joined if not any(node in near[member] for member in members)]
    lacking = [node for node, each in others.items() if each.complete != kept]
    pushed = [node for node, each in others.items() if each.passed_on != kept]
    # The giver never had to send that round: who awaits it has its place bound to the keeper.
    is_on_loan = before is not None and before.kept_round == kept and before.keeper != giver and lacking != []
    return PartitionMove(unit, part, candidates if others and not is_read_there and not is_on_loan else [], kept,
                giver if lacking else -1, lacking, bool(lacking), giver, pushed)


def _check(unit: UnitPlan, part: PartPlan, done: Mapping[int, _Progress], kept: int) -> None:
    """Raise `ProtocolError` if one of *done* cannot be, where *kept* is the last round that is complete anywhere."""
    for node, each in done.items():
        if (rounds_ahead(each.complete, kept) not in (0, -1) or rounds_ahead(each.passed_on, kept) not in (0, 1)
                or rounds_ahead(each.passed_on, each.complete) not in (0, 1)):
            raise ProtocolError(f"node {node} has passed on round {each.passed_on} of partition {part.part} of "
                                f"{unit.name!r} and has round {each.complete}, but round {kept} is complete elsewhere")


def _reaches(owner: int, members: Mapping[int, _Progress], near: Mapping[int, set[int]]) -> bool:
    """Whether results of the member *owner* reach all *members* where they read those of the lost one.

    Over a wire they are written anywhere. By shared memory they are read where the owner writes them.
    """
    return all(node == owner or node not in near[owner] or each.place == members[owner].place
               for node, each in members.items())


@dataclass(frozen=True)
class JobSnapshot:
    """Where a job goes on. `roster` knows who is lost and from where the others are heard; `absent` are lost by now.

    `generation`: no higher number was heard of. `frozen`: a recovery was under way. `rates`: of all NICs, as placement
    counts on them; `unmeasured` nodes have not said theirs. `answers`: by node, what it has missed, in order; `later`:
    what nodes have said besides, in order, with their indices.
    """

    roster: Roster
    job: str
    epoch: int
    absent: Sequence[int]
    frozen: bool
    generation: int
    next_unit: int
    units: Sequence[UnitPlan]
    lent: Mapping[int, OwnerChange]
    gone_from: Mapping[int, Sequence[int]]
    failed: Mapping[str, BpsError]
    n_declared: int
    barrier: int
    rates: Sequence[float]
    unmeasured: Sequence[int]
    ownable_nbytes: Sequence[int]
    answers: Mapping[int, Sequence[Message]]
    later: Sequence[tuple[int, Message]]

    @property
    def lost(self) -> set[int]:
        """All nodes that are lost, those included that are so by now."""
        return {*self.roster.lost, *self.absent}

    @property
    def committed(self) -> list[str]:
        """The names of all committed tensors, each once."""
        return list(dict.fromkeys(member.name for unit in self.units for member in unit.members))
