"""Finds how a job goes on when a helper or a rank is lost, or a helper has joined: who sums, and what again. Pure.

The inputs of a step stay with the ranks until its result has been read (docs/design/recovery.md), so nothing is rolled
back. For each partition that a lost node owned the survivors report the round that they forwarded last, and the round
that is complete with them. Rounds are synchronous: no node begins one before its predecessor is complete with it, no
node completes one that some node has not forwarded. So if the latest complete round anywhere is k,

    complete with a node    k, or k - 1: then it lacks the result of k, which a node that has it, the keeper, sends to
    it forwarded by a node     k, or k + 1: then it forwards that again, to the new owner, from where its inputs still
    are

and the survivors continue with the same bits as an undisturbed job.

If ranks are lost, this holds for each unit as a whole: with k the latest round of which some survivor has all
partitions, all ranks have the result of k, and the round k + 1 is summed without the lost ranks, from the inputs of the
others. Where a partition of k + 1 is complete already, with the inputs of lost ranks, it is summed again (`Redo`), so
that all of a unit is the sum of the same ranks.

Partitions for newcomers have an owner that lives. Then k is its own round, it has sent that result to all, and has what
was forwarded to it of the next one: that arrives, and is dropped, before anything changes owners.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ..errors import BpsError, PeerLostError, ProtocolError
from ..messages import FreezeReport, Message, NewKeeper, NodeInfo, OwnerChange, PartPlan, Redo, UnitPlan
from ..placement.partition import round_after, rounds_ahead
from ..roster import Roster


class EpochChange:
    """One change of epoch in progress: first which nodes have stopped, then which are ready for the new owners.

    *lost*, *survivors*: node indices: lost since the last epoch; those that take part from now on. *deadline*: when to
    give up, on the job's clock. *joined*: survivors that are to get their share; then no node is lost. *lost_ranks*:
    all that are lost by now; *fresh_ranks*: those of them that were not in the last epoch.
    """

    def __init__(self, epoch: int, lost: Collection[int], survivors: Collection[int], reason: str, deadline: float,
                 joined: Collection[int] = (), lost_ranks: Collection[int] = (),
                 fresh_ranks: Collection[int] = ()) -> None:
        self.epoch = epoch
        self.lost = frozenset(lost)
        self.joined = frozenset(joined)
        self.lost_ranks = frozenset(lost_ranks)
        self.fresh_ranks = frozenset(fresh_ranks)
        self.reason = reason
        self.deadline = deadline
        self.generation = 0
        self.units: Sequence[UnitPlan] = ()  # with their new owners
        self.owner_changes: Sequence[OwnerChange] = ()
        self.redone: Sequence[Redo] = ()
        self.keepers: Sequence[NewKeeper] = ()
        #: Each unit with lost ranks, and its first round without them.
        self.begins: Sequence[tuple[int, int]] = ()
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
                      changes: Mapping[int, OwnerChange]) -> list[PartitionMove]:
        """Return the move of each partition of *units* that a lost node owned.

        *changes*, by partition: the last owner change. Raises `PeerLostError` if no node can own one of them;
        `ProtocolError` if reports contradict what nodes can have done.
        """
        helpers = [node.index for node in nodes if not node.ranks and node.index in self._survivors]
        near, kept = self._near, {each.part: each.kept_round for each in self.redone}
        return [_move_of_lost(unit, part, _no_further(done, kept.get(part.part)), helpers, near,
                              self._unfinished(changes.get(part.part)))
                for unit, part, done in self._wanted(units, nodes, lambda unit, part: part.owner in self.lost) if done]

    def _unfinished(self, change: OwnerChange | None) -> OwnerChange | None:
        """Return *change* if some nodes lacked its round then, and the keeper, which lives, was to send it to them."""
        is_unfinished = change is not None and change.lacking and change.giver < 0 and change.keeper in self._survivors
        return change if is_unfinished else None

    def leave_ranks(self, units: Sequence[UnitPlan], nodes: Sequence[NodeInfo], changes: Mapping[int, OwnerChange]
                    ) -> None:
        """Find `redone`, `keepers` and `begins` of *units* without the `fresh_ranks`, before `moves_of_lost`.

        *changes* as there; raises as that.
        """
        home = {rank: node.index for node in nodes for rank in node.ranks}
        concerned = [unit for unit in units
                     if self.fresh_ranks and (not unit.ranks or not self.fresh_ranks.isdisjoint(unit.ranks))]
        reports: dict[int, list[tuple[PartPlan, dict[int, _Progress]]]] = {unit.unit: [] for unit in concerned}
        for unit, part, done in self._wanted(concerned, nodes, lambda unit, part: True, with_owner=True,
                                             with_leaving=True):
            if done:
                reports[unit.unit].append((part, done))
        redone: list[Redo] = []
        keepers: list[NewKeeper] = []
        begins: list[tuple[int, int]] = []
        for unit in concerned:
            ranks = frozenset(unit.ranks or home)
            members = {home[rank] for rank in ranks - self.lost_ranks}
            hit = {home[rank] for rank in ranks & self.fresh_ranks} & self._survivors
            kept = None
            if members and reports[unit.unit] and not unit.separate:
                kept = _last_whole(unit, reports[unit.unit], members)
                begins.append((unit.unit, round_after(kept)))
            for part, done in reports[unit.unit]:
                change = changes.get(part.part)
                redo = _redo(part, done, kept, hit, hit - members, change, self._survivors)
                redone += [redo] if redo is not None else []
                keeper = self._new_keeper(unit, part, done, members, change, redo)
                keepers += [keeper] if keeper is not None else []
        self.redone, self.keepers, self.begins = redone, keepers, begins

    def _new_keeper(self, unit: UnitPlan, part: PartPlan, done: Mapping[int, _Progress], members: Collection[int],
                    change: OwnerChange | None, redo: Redo | None) -> NewKeeper | None:
        """Return who sends the result of *change* in place of its keeper, if that is lost, and it is still lacked.

        Raises `PeerLostError` if no remaining node can send it.
        """
        if (change is None or not change.lacking or change.giver >= 0 or change.keeper in self._survivors
                or part.owner not in self._survivors):
            return None
        if redo is not None and rounds_ahead(change.kept_round, redo.kept_round) > 0:
            return None  # it is summed again
        lacking = tuple(node for node in change.lacking if node in members
                        and rounds_ahead(done[node].complete, change.kept_round) < 0)
        holders = [node for node in sorted(members) if rounds_ahead(done[node].complete, change.kept_round) >= 0
                   and not self._near[node] & set(lacking)]
        if lacking and not holders:
            raise PeerLostError(f"the result of round {change.kept_round} of partition {part.part} of {unit.name!r} "
                                f"cannot reach nodes {list(lacking)}")
        if not lacking:
            return None
        return NewKeeper(part=part.part, round=change.kept_round, keeper=holders[0], lacking=lacking)

    def moves_to_joined(self, units: Sequence[UnitPlan], nodes: Sequence[NodeInfo],
                        changes: Mapping[int, OwnerChange]) -> list[PartitionMove]:
        """Return the move of each partition of *units* that its owner can give to a node that has joined.

        Partitions whose owners keep more than sums stay, and compressed ones; also those whose results other nodes read
        in the owner's memory, or would read in the new owner's; and those that a node still expects from another node
        than the owner, by *changes* (as in `moves_of_lost`). Raises `ProtocolError` if reports contradict what nodes
        can have done.
        """
        near = self._near
        found = [_move_to_joined(part.owner, unit, part, done, sorted(self.joined), near,
                                 self._unfinished(changes.get(part.part)))
                 for unit, part, done in self._wanted(units, nodes, lambda unit, part: is_plain(unit), with_owner=True)]
        return [move for move in found if move.candidates]

    @property
    def _near(self) -> dict[int, set[int]]:
        return {node: set(report.near) for node, report in self._reports.items()}

    def _wanted(self, units: Sequence[UnitPlan], nodes: Sequence[NodeInfo],
                is_wanted: Callable[[UnitPlan, PartPlan], bool], with_owner: bool = False, with_leaving: bool = False
                ) -> Iterator[tuple[UnitPlan, PartPlan, dict[int, _Progress]]]:
        """Yield the wanted partitions, with the reports of the nodes that push them.

        *with_owner*: and of the owner, if that lives. *with_leaving*: and of nodes that have lost their last rank that
        pushes them.
        """
        said = {node: {part: _Progress(*rest) for part, *rest in report.progress}
                for node, report in self._reports.items()}
        members_of: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        for unit in units:
            wanted = [part for part in unit.parts if is_wanted(unit, part)]
            if wanted and unit.ranks not in members_of:
                ranks_of = {node.index: set(node.ranks) & set(unit.ranks) if unit.ranks else set(node.ranks)
                            for node in nodes if node.index in self._survivors}
                members_of[unit.ranks] = ([index for index, theirs in ranks_of.items() if theirs - self.lost_ranks],
                                          [index for index, theirs in ranks_of.items() if theirs & self.fresh_ranks])
            for part in wanted:
                members, hit = members_of[unit.ranks]
                if not members and not with_leaving:
                    continue  # all of its ranks are lost
                has_owner = part.owner in self._survivors and (members or part.part in said.get(part.owner, {}))
                asked = [*members, *([part.owner] if with_owner and has_owner and part.owner not in members else [])]
                asked += [node for node in hit
                          if with_leaving and node not in asked and part.part in said.get(node, {})]
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


def _latest(done: Mapping[int, _Progress]) -> int:
    """Return the latest round that is complete anywhere."""
    last = next(iter(done.values())).complete
    for each in done.values():
        last = each.complete if rounds_ahead(each.complete, last) > 0 else last
    return last


def _last_whole(unit: UnitPlan, parts: Sequence[tuple[PartPlan, Mapping[int, _Progress]]], members: Collection[int]
                ) -> int:
    """Return the latest round of *unit* of which one of *members* has all partitions; raises `ProtocolError`."""
    last: int | None = None
    for node in members:
        whole = parts[0][1][node].complete
        for _, done in parts:
            whole = done[node].complete if rounds_ahead(done[node].complete, whole) < 0 else whole
        last = whole if last is None or rounds_ahead(whole, last) > 0 else last
    assert last is not None, "a unit without ranks is not asked about"
    for part, done in parts:
        for node, each in done.items():
            # a node that has lost its last rank may have had one round more as a whole, and begun the next
            most = 1 if node in members or node == part.owner else 2
            if (rounds_ahead(each.complete, last) not in (-1, 0, 1)
                    or not 0 <= rounds_ahead(each.passed_on, last) <= most):
                raise ProtocolError(f"node {node} has passed on round {each.passed_on} of partition {part.part} of "
                                    f"{unit.name!r} and has round {each.complete}, but all of it is complete up to "
                                    f"round {last}")
    return last


def _redo(part: PartPlan, done: Mapping[int, _Progress], kept: int | None, hit: Collection[int],
          leaving: Collection[int], change: OwnerChange | None, survivors: Collection[int]) -> Redo | None:
    """Return what is to be done again of *part* after round *kept* (None: of each partition its own), if anything is.

    *hit*: nodes that have lost a rank, and live; *leaving*: those that have no other one. *change*: the last one of its
    owner, whose keeper may be lost: then what that was to send does not come.
    """
    owner = done.get(part.owner)
    is_separate = kept is None
    kept = _latest(done) if kept is None else kept
    goes_back = owner is not None and rounds_ahead(owner.complete, kept) > 0
    # then the inputs of that round went to the owner before
    took_over = (goes_back and owner is not None and change is not None and change.owner == part.owner
                 and change.kept_round == owner.complete)
    others = {node: each for node, each in done.items() if node != part.owner}
    again = tuple(sorted(
        node for node, each in others.items() if not is_separate and node not in leaving
        and rounds_ahead(each.passed_on, kept) > 0 and (node in hit or took_over)))
    stale: list[tuple[int, int, int]] = []
    for node, each in others.items():
        sender, coming = part.owner, owner.complete if owner is not None else each.complete
        if (change is not None and change.giver < 0 and node in change.lacking
                and rounds_ahead(each.complete, change.kept_round) < 0):
            sender, coming = change.keeper, change.kept_round
        if (sender in survivors and rounds_ahead(each.complete, coming) < 0
                and (node in leaving or rounds_ahead(coming, kept) > 0)):
            stale.append((node, sender, coming))
        if (owner is not None and rounds_ahead(each.passed_on, owner.complete) > 0
                and (node in again or node in leaving)):
            stale.append((part.owner, node, each.passed_on))
    further = any(rounds_ahead(each.complete, kept) > 0 for each in done.values())
    gone = tuple(sorted(node for node in leaving if node in others))
    if not further and not again and not gone:
        return None
    return Redo(part=part.part, kept_round=kept, was_sent=goes_back, again=again, leaving=gone, stale=tuple(stale))


def note_changes(known: dict[int, OwnerChange], changes: Sequence[OwnerChange], redone: Sequence[Redo],
                 keepers: Sequence[NewKeeper]) -> None:
    """Note in *known*, the last change of each partition's owner, what a `Recover` that is committed has changed."""
    for redo in redone:
        before = known.get(redo.part)
        if before is not None and rounds_ahead(before.kept_round, redo.kept_round) > 0:
            del known[redo.part]  # the round that it kept is summed again
    for each in keepers:
        known[each.part] = msgspec.structs.replace(known[each.part], keeper=each.keeper, lacking=each.lacking)
    known.update({each.part: each for each in changes})


def _no_further(done: Mapping[int, _Progress], kept: int | None) -> Mapping[int, _Progress]:
    """Return *done*, in which no round after *kept* is complete, because it is summed again."""
    if kept is None:
        return done
    return {node: each._replace(complete=kept) if rounds_ahead(each.complete, kept) > 0 else each
            for node, each in done.items()}


def _move_of_lost(unit: UnitPlan, part: PartPlan, done: Mapping[int, _Progress], helpers: Sequence[int],
                  near: Mapping[int, set[int]], before: OwnerChange | None) -> PartitionMove:
    """Return who can own *part*; *done*: progress by member; *before*: the change before, if some lacked a round."""
    last = _latest(done)
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

    `roster` knows the lost nodes and the connections of the others; `absent` nodes are lost by now; `lost_ranks`: all
    that the job goes on without, or is to. `generation`: no
    higher number was heard of. `frozen`: a recovery was in progress. `rates`: of all NICs, as placement uses them;
    `unmeasured` nodes have not reported theirs. `answers`: by node, the messages that it has missed, in order; `later`:
    what nodes have reported besides, in order, with their indices. `voters`, `dead`: as in `roster.may_decide`;
    `settled_epoch`: the last committed epoch, which `voters` are of.
    """

    roster: Roster
    job: str
    epoch: int
    absent: Sequence[int]
    frozen: bool
    generation: int
    next_unit: int
    units: Sequence[UnitPlan]
    changes: Mapping[int, OwnerChange]
    gone_from: Mapping[int, Sequence[int]]
    failed: Mapping[str, BpsError]
    n_declared: int
    barrier: int
    rates: Sequence[float]
    unmeasured: Sequence[int]
    ownable_nbytes: Sequence[int]
    answers: Mapping[int, Sequence[Message]]
    later: Sequence[tuple[int, Message]]
    lost_ranks: AbstractSet[int] = frozenset()
    voters: Collection[int] = ()
    dead: Collection[int] = ()
    settled_epoch: int = 1

    @property
    def lost(self) -> set[int]:
        """All nodes that are lost, those included that are lost only now."""
        return {*self.roster.lost, *self.absent}

    @property
    def committed(self) -> list[str]:
        """The names of all committed tensors, each once."""
        return list(dict.fromkeys(member.name for unit in self.units for member in unit.members))
