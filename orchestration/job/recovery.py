"""Finds new owners for partitions when a helper is lost or has joined, and the round from which they go on. Pure.

The inputs of a step stay with the ranks until its result has been read (docs/design/recovery.md), so nothing is rolled
back. For each partition that a lost node owned the survivors report the round that they forwarded last, and the round
that is complete with them. Rounds are synchronous: no node begins one before its predecessor is complete with it, no
node completes one that some node has not forwarded. So if the latest complete round anywhere is k,

    complete with a node    k, or k - 1: then it lacks the result of k, which a node that has it, the keeper, sends to
    it forwarded by a node     k, or k + 1: then it forwards that again, to the new owner, from where its inputs still
    are

and the survivors continue with the same bits as an undisturbed job.

Partitions for newcomers have an owner that lives. Then k is its own round, it has sent that result to all, and has what
was forwarded to it of the next one: that arrives, and is dropped, before anything changes owners.
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
    """One change of epoch in progress: first which nodes have stopped, then which are ready for the new owners.

    *lost*, *survivors*: node indices: lost since the last epoch; those that take part from now on. *deadline*: when to
    give up, on the job's clock. *joined*: survivors that are to get their share; then no node is lost.
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
        """Note that *node* has stopped; return whether it was the last. Late messages are ignored."""
        if message.epoch != self.epoch or self.generation:
            return False
        self._reports[node] = message
        return self._reports.keys() >= self._survivors

    def ready(self, node: int, generation: int) -> bool:
        """Note that *node* is prepared; return whether it was the last. Late messages are ignored."""
        if not self.generation or generation != self.generation:
            return False
        self._ready.add(node)
        return self._ready >= self._survivors

    @property
    def missing(self) -> list[int]:
        """The nodes that have not answered."""
        return sorted(self._survivors - (self._ready if self.generation else self._reports.keys()))

    def moves_of_lost(self, units: Sequence[UnitPlan], nodes: Sequence[NodeInfo],
                      unfinished: Mapping[int, OwnerChange]) -> list[PartitionMove]:
        """Return the move of each partition of *units* that a lost node owned.

        *unfinished*, by partition: of the last owner changes those with a round that some nodes lacked. Raises
        `PeerLostError` if no node can own one of them; `ProtocolError` if reports contradict what nodes can have done.
        """
        helpers = [node.index for node in nodes if not node.ranks and node.index in self._survivors]
        near = self._near
        return [_move_of_lost(unit, part, done, helpers, near, unfinished.get(part.part))
                for unit, part, done in self._wanted(units, nodes, lambda unit, part: part.owner in self.lost)]

    def moves_to_joined(self, units: Sequence[UnitPlan], nodes: Sequence[NodeInfo],
                        unfinished: Mapping[int, OwnerChange]) -> list[PartitionMove]:
        """Return the move of each partition of *units* that its owner can give to a node that has joined.

        Partitions whose owners keep more than sums stay, and compressed ones; also those whose results other nodes read
        in the owner's memory, or would read in the new owner's; and those that a node still expects from another node
        than the owner, by *unfinished* (as in `moves_of_lost`). Raises `ProtocolError` if reports contradict what nodes
        can have done.
        """
        near = self._near
        found = [_move_to_joined(part.owner, unit, part, done, sorted(self.joined), near, unfinished.get(part.part))
                 for unit, part, done in self._wanted(units, nodes, lambda unit, part: is_plain(unit), with_owner=True)]
        return [move for move in found if move.candidates]

    @property
    def _near(self) -> dict[int, set[int]]:
        return {node: set(report.near) for node, report in self._reports.items()}

    def _wanted(self, units: Sequence[UnitPlan], nodes: Sequence[NodeInfo],
                is_wanted: Callable[[UnitPlan, PartPlan], bool], with_owner: bool = False
                ) -> Iterator[tuple[UnitPlan, PartPlan, dict[int, _Progress]]]:
        """Yield the wanted partitions, with the reports of the nodes that push them, and of the owner if asked for."""
        said = {node: {part: _Progress(*rest) for part, *rest in report.progress}
                for node, report in self._reports.items()}
        members_of: dict[tuple[int, ...], list[int]] = {}
        for unit in units:
            wanted = [part for part in unit.parts if is_wanted(unit, part)]
            if wanted and unit.ranks not in members_of:
                members_of[unit.ranks] = [node.index for node in nodes if node.ranks and (
                    not unit.ranks or not set(unit.ranks).isdisjoint(node.ranks))]
            for part in wanted:
                members = members_of[unit.ranks]
                asked = [*members, *([part.owner] if with_owner and part.owner not in members else [])]
                unheard = [node for node in asked if part.part not in said.get(node, {})]
                if unheard:
                    raise ProtocolError(f"nodes {unheard} say nothing of partition {part.part} of {unit.name!r}, which "
                                        "their ranks push, or which they own")
                yield unit, part, {node: said[node][part.part] for node in asked}


def is_plain(unit: UnitPlan) -> bool:
    """Whether owners of *unit* keep only sums, uncompressed: then it can change owners."""
    return unit.codec is None and unit.store is None


@dataclass(frozen=True)
class PartitionMove:
    """A partition that needs a new owner: the `candidates`, and the other fields of its `OwnerChange`."""

    unit: UnitPlan
    part: PartPlan
    candidates: list[int]
    kept_round: int
    keeper: int
    lacking: tuple[int, ...]
    was_sent: bool
    giver: int = -1
    pushed: tuple[int, ...] = ()

    def owner_change(self, owner: int) -> OwnerChange:
        """Return the change to *owner*."""
        return OwnerChange(part=self.part.part, owner=owner, kept_round=self.kept_round, keeper=self.keeper,
                          lacking=self.lacking, lent=self.was_sent, giver=self.giver, pushed=self.pushed)


class _Progress(NamedTuple):
    """One node's report on one partition, as in `FreezeReport`."""

    passed_on: int
    complete: int
    place: int


def _move_of_lost(unit: UnitPlan, part: PartPlan, done: Mapping[int, _Progress], helpers: Sequence[int],
                  near: Mapping[int, set[int]], before: OwnerChange | None) -> PartitionMove:
    """Return who can own *part*; *done*: progress by member; *before*: the change before, if some lacked a round."""
    last = next(iter(done.values())).complete
    for each in done.values():
        last = each.complete if rounds_ahead(each.complete, last) > 0 else last
    _check(unit, part, done, last)
    holders = [node for node, each in done.items() if each.complete == last]
    behind = [node for node in done if node not in holders]
    # A node that reads results where the lost owner or a holder does has this one, and was only not told.
    in_place = {part.owner, *(done[node].place for node in holders)}
    lacking = [node for node in behind if done[node].place not in in_place]
    # A result under way must not be sent again: it would arrive over the next one.
    was_sent = (before is not None and before.kept_round == last and set(lacking) <= set(before.lacking)
                and lacking != [])
    keepers = [before.keeper] if before is not None and was_sent else [
        node for node in holders if not near[node] & set(lacking)]
    if lacking and not keepers:
        raise PeerLostError(f"the result of round {last} of partition {part.part} of {unit.name!r} cannot reach nodes "
                            f"{lacking} from nodes {holders}, with which they share memory")
    candidates = [node for node in holders if _reaches(node, done, near)] if unit.codec is None else []
    if unit.codec is None or all(each.place != part.owner for each in done.values()):
        candidates += [node for node in helpers if not any(node in near[member] for member in done)]
    if not candidates:
        why = (" (it is compressed, and no helper is left)" if unit.codec is not None
               else " (some nodes read results where the lost one has put them, others do not)")
        raise PeerLostError(f"nobody can go on with partition {part.part} of {unit.name!r}{why}")
    return PartitionMove(unit, part, candidates, last, keepers[part.part % len(keepers)] if lacking else -1,
                         tuple(lacking), was_sent)


def _move_to_joined(giver: int, unit: UnitPlan, part: PartPlan, done: Mapping[int, _Progress], joined: Sequence[int],
                    near: Mapping[int, set[int]], before: OwnerChange | None) -> PartitionMove:
    """Return which of *joined* can own *part* of *giver*, which lives; *done* includes it; rest as `_move_of_lost`."""
    last = done[giver].complete
    _check(unit, part, done, last)
    members = {node: each for node, each in done.items() if each.place >= 0}
    others = {node: each for node, each in members.items() if node != giver}
    is_read_there = any(each.place == giver or giver in near[node] for node, each in others.items())
    candidates = [node for node in joined if not any(node in near[member] for member in members)]
    lacking = tuple(node for node, each in others.items() if each.complete != last)
    pushed = tuple(node for node, each in others.items() if each.passed_on != last)
    # The giver never had to send that round: nodes that wait for it expect it from the keeper.
    has_other_keeper = before is not None and before.kept_round == last and before.keeper != giver and lacking != ()
    return PartitionMove(unit, part, candidates if others and not is_read_there and not has_other_keeper else [], last,
                         giver if lacking else -1, lacking, bool(lacking), giver, pushed)


def _check(unit: UnitPlan, part: PartPlan, done: Mapping[int, _Progress], last: int) -> None:
    """Raise `ProtocolError` if one of *done* is impossible, *last* being the last round that is complete anywhere."""
    for node, each in done.items():
        if (rounds_ahead(each.complete, last) not in (0, -1) or rounds_ahead(each.passed_on, last) not in (0, 1)
                or rounds_ahead(each.passed_on, each.complete) not in (0, 1)):
            raise ProtocolError(f"node {node} has passed on round {each.passed_on} of partition {part.part} of "
                                f"{unit.name!r} and has round {each.complete}, but round {last} is complete elsewhere")


def _reaches(owner: int, members: Mapping[int, _Progress], near: Mapping[int, set[int]]) -> bool:
    """Whether results of the member *owner* reach all *members* where they read those of the lost node.

    Over a wire they are written anywhere. By shared memory they are read where the owner writes them.
    """
    return all(members[node].place == members[owner].place for node in near[owner] if node in members)


@dataclass(frozen=True)
class JobSnapshot:
    """Where a job continues after its scheduler was lost, as `merge_reports` finds it.

    `roster` knows the lost nodes and the connections of the others; `absent` nodes are lost by now. `generation`: no
    higher number was heard of. `frozen`: a recovery was in progress. `rates`: of all NICs, as placement uses them;
    `unmeasured` nodes have not reported theirs. `answers`: by node, the messages that it has missed, in order; `later`:
    what nodes have reported besides, in order, with their indices.
    """

    roster: Roster
    job: str
    epoch: int
    absent: Sequence[int]
    frozen: bool
    generation: int
    next_unit: int
    units: Sequence[UnitPlan]
    unfinished: Mapping[int, OwnerChange]
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
        """All nodes that are lost, those included that are lost only now."""
        return {*self.roster.lost, *self.absent}

    @property
    def committed(self) -> list[str]:
        """The names of all committed tensors, each once."""
        return list(dict.fromkeys(member.name for unit in self.units for member in unit.members))
