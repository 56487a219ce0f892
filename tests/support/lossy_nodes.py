"""Model of the nodes of a job, without bytes, which tracks every input, partial and result.

A `ModelNode` does what `pyx/core.h`, `pyx/owner_change.h`, `node/recovery.py`, `node/owner_changes.py` and
`node/redone_rounds.py` do. Memory is a table of contents. A write delivers the contents of its source at its arrival,
so premature reuse of memory is detected, and it must have the round that its slot expects, as with RDMA. Nodes of one
host announce addresses, and read results in the owner's memory.
"""
from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from bpsfast.orchestration import messages as m

ROUNDS = 1 << 32


def after(round_, n=1):
    return (round_ + n) % ROUNDS


def ahead(round_, than):
    return (round_ - than + ROUNDS // 2) % ROUNDS - ROUNDS // 2


class Write(NamedTuple):
    """A write in flight; to a node of the same host, its announcement."""

    round: int
    at: tuple[Any, ...]


class Part:
    """As in `part.h`; `arrived`: location of each input by its source, ("rank", number) or ("node", index)."""

    def __init__(self, sources, owner, owned, round_, place, unit, shm_peers=()):
        self.sources, self.owner, self.owned, self.round = sources, owner, owned, round_
        self.shm_peers = shm_peers  # owned: nodes of this host that are told of a result
        self.place = place  # the node in whose memory the result is read or summed
        self.unit = unit
        self.arrived, self.last = {}, {}
        self.is_kept, self.keeper, self.kept_round = False, -1, -1
        self.committed = False

    def next_round(self):
        self.round = after(self.round)
        self.last, self.arrived = self.arrived, {}

    def lose(self, source):
        """As `bps_lose_input`; return whether there are inputs left."""
        self.shm_peers = [each for each in self.shm_peers if ("node", each) != source]
        self.sources = [each for each in self.sources if each != source]
        self.arrived.pop(source, None)
        self.last.pop(source, None)
        return bool(self.sources)


class ModelNode:
    """One node. *world*: `memory`, `post`, `end_process`, `near`, and messages to the scheduler (`tell`)."""

    def __init__(self, world, index, ranks):
        self.world, self.index, self.ranks = world, index, ranks
        self.alive, self.frozen = True, False
        self.units, self.parts, self.board, self.queued = {}, {}, {}, []
        self.early, self.excluded = [], set()
        self.given = {}  # part -> abandoned round whose inputs may still arrive
        self.bound = {}  # (node, part) -> [target of writes, expected round]
        self.lanes = {rank: deque() for rank in ranks}
        self.prepared = None
        self.awaited, self.unbound, self.is_waiting = [], [], False
        self.gone = set()  # nodes that were lost before this one came
        self.lost_ranks, self.told_ranks = frozenset(), frozenset()  # by the last freeze; that ranks here know of
        self.names, self.lost_from = {}, {}  # by unit: its name; by its name: (first round, ranks that are lost)
        self.redone, self.superseded, self.dropped = [], [], set()
        self.generation = None  # the plan or `Recover` that waits for a Commit

    # -- the engine ---------------------------------------------------------------------------------------

    def arrive(self, source, number, round_, at):
        if self.given.get(number) == round_ and source[0] == "node" and (
                number not in self.parts or source[1] != self.parts[number].owner):
            return
        assert number in self.parts, f"node {self.index} knows no partition {number}, which {source} has sent"
        part = self.parts[number]
        is_kept = part.is_kept and source == ("node", part.keeper) and round_ == part.kept_round
        if not part.owned and (is_kept or source == ("node", part.owner)):
            if is_kept or round_ == part.round:
                part.is_kept &= not is_kept
                self.board[number] = round_
            return
        distance = ahead(round_, after(part.round))
        if distance < 0:
            return
        assert distance == 0 and source in part.sources and source not in part.arrived, (self.index, source, number)
        part.arrived[source] = at
        if len(part.arrived) == len(part.sources) and part.committed:
            self.ready(number)

    def ready(self, number):
        part = self.parts[number]
        if part.owned or len(part.sources) > 1:
            self.queued.append(number)
        else:
            self.forward(number, *part.arrived.values())

    def run_part(self, number):
        assert not self.frozen
        self.queued.remove(number)
        part = self.parts[number]
        round_ = after(part.round)
        terms = [self.world.memory[part.arrived[source]] for source in part.sources]
        total = tuple(sorted(term for each in terms for term in each))
        if not part.owned:
            self.world.memory["partial", self.index, number] = total
            self.forward(number, ("partial", self.index, number))
            return
        self.world.require_sum(number, part.unit, round_, total)
        at = ("result", part.place, number, round_ & 1)
        self.world.memory[at] = total
        part.next_round()
        self.board[number] = round_
        wired = [node for node in self.members(part.unit) if node != self.index
                 and not self.world.near(node, self.index)]
        for member in [*part.shm_peers, *wired]:
            self.world.post(self.index, member, number, Write(round_, at))

    def forward(self, number, at):
        self.parts[number].next_round()
        self.world.post(self.index, self.parts[number].owner, number, Write(self.parts[number].round, at))

    def come(self, index, number, write):
        """Receive a write or an announcement of node *index*."""
        at = write.at
        if not self.world.near(index, self.index):
            assert (index, number) in self.bound, f"node {index} writes {number} into nothing at node {self.index}"
            bound = self.bound[index, number]
            assert bound[1] == write.round, f"node {index} writes round {write.round} of {number}, expected: {bound}"
            bound[1] = after(bound[1])
            at = (*bound[0], write.round & 1) if bound[0][0] == "result" else bound[0]
            self.world.memory[at] = self.world.memory[write.at]
            if self.frozen:
                self.early.append((index, number, write.round, at))
                self.look()
                return
        self.arrive(("node", index), number, write.round, at)

    def drain(self, rank):
        number, round_ = self.lanes[rank].popleft()
        self.arrive(("rank", rank), number, round_, ("input", rank, number))

    def follow(self, number, owner, kept, keeper):
        part = self.parts[number]
        assert not part.owned and part.round in (kept, after(kept)), (self.index, number, part.round, kept)
        part.owner, part.is_kept = owner, False
        self.given.pop(number, None)
        if ahead(self.board[number], kept) < 0:
            part.is_kept, part.keeper, part.kept_round = keeper is not None, keeper, kept
            if keeper is None:
                self.board[number] = kept
        if part.round != kept:
            self.pass_on_again(number)

    def pass_on_again(self, number):
        part = self.parts[number]
        at = ("partial", self.index, number) if len(part.sources) > 1 else next(iter(part.last.values()))
        self.world.post(self.index, part.owner, number, Write(part.round, at))

    def succeed(self, number, fresh, kept):
        old = self.parts.get(number)
        if old is None:
            self.board[number] = kept
        else:
            assert not old.owned and old.round in (kept, after(kept)), (self.index, number, old.round, kept)
            fresh.arrived = dict(old.last if old.round != kept else old.arrived)
            fresh.arrived = {source: at for source, at in fresh.arrived.items() if source in fresh.sources}
            fresh.last = dict(old.last)
        self.given.pop(number, None)
        self.parts[number] = fresh

    def give_up(self, number, owner, kept):
        """As `bps_give_up`."""
        old = self.parts.pop(number)
        assert old.owned and old.round == kept, (self.index, number, old.round, kept)
        self.given[number] = after(kept)
        if self.local(old.unit):
            part = self.parts[number] = Part(self.sources(old.unit, False), owner, False, kept, old.place, old.unit)
            part.arrived = {source: at for source, at in old.arrived.items() if source in part.sources}
            part.last = {source: at for source, at in old.last.items() if source in part.sources}

    def commit(self):
        """As `bps_table_commit`: activate new parts, and process the writes that arrived meanwhile."""
        self.queued = []
        for number, part in self.parts.items():
            part.committed = True
            if len(part.arrived) == len(part.sources):
                self.ready(number)
        self.frozen = False
        early, self.early = self.early, []
        for index, number, round_, at in early:
            if index not in self.excluded:
                self.arrive(("node", index), number, round_, at)

    # -- the node -----------------------------------------------------------------------------------------

    def hear(self, message):
        handlers = {m.Plan: self.on_plan, m.Commit: self.on_commit, m.Freeze: self.on_freeze,
                    m.Recover: self.on_recover, m.Abort: lambda _: self.world.end_process(self.index),
                    m.Joined: self.on_joined, m.Welcome: self.on_welcome}
        if type(message) in handlers:
            handlers[type(message)](message)

    def members(self, unit):
        """The nodes with ranks that push *unit* and are not lost."""
        left = set(self.world.ranks_of(unit)) - self.lost_ranks
        return [node.index for node in self.world.nodes if not left.isdisjoint(node.ranks)]

    def local(self, unit):
        return [rank for rank in self.ranks if rank in self.world.ranks_of(unit) and rank not in self.lost_ranks]

    def sources(self, unit, owned):
        members = self.members(unit) if owned else [self.index]
        return [source for index in members for source in (
            [("rank", rank) for rank in self.local(unit)] if index == self.index else [("node", index)])]

    def bind(self, index, number, at, round_):
        if not self.world.near(index, self.index):
            self.bound[index, number] = [at, round_]

    def own(self, unit, number, place, round_):
        others = [index for index in self.members(unit) if index != self.index]
        for index in others:
            self.bind(index, number, ("slot", self.index, index, number), after(round_))
        return Part(self.sources(unit, True), -1, True, round_, place, unit,
                    [index for index in others if self.world.near(index, self.index)])

    def on_joined(self, message):
        self.world.tell(self.index, m.NewcomerReady(node=message.node.index))
        self.world.expected.add((self.index, message.node.index))

    def on_welcome(self, message):
        self.gone = set(message.lost)
        if message.is_late:
            self.world.dialled.add(self.index)

    def on_plan(self, plan):
        first = self.world.first_round
        for unit in plan.units:
            for part in unit.parts:
                if part.owner == self.index:
                    self.parts[part.part] = self.own(unit.name, part.part, self.index, first)
                elif self.local(unit.name):
                    place = part.owner if self.world.near(part.owner, self.index) else self.index
                    self.parts[part.part] = Part(self.sources(unit.name, False), part.owner, False, first, place,
                                                 unit.name)
                    self.bind(part.owner, part.part, ("result", self.index, part.part), after(first))
                self.board[part.part] = first
        self.generation = plan
        self.world.tell(self.index, m.Ready(generation=plan.generation))

    def on_commit(self, message):
        generation, self.generation = self.generation, None
        assert generation.generation == message.generation
        if isinstance(generation, m.Recover):
            self.begin(generation)
        else:
            self.units |= {unit.name: [part.part for part in unit.parts] for unit in generation.units}
            self.names |= {unit.unit: unit.name for unit in generation.units}
            self.lost_from |= {unit.name: [(self.world.first_round, self.told_ranks)] for unit in generation.units}
        self.commit()

    def forget(self):
        """As `Plans.forget` and `PlanInstaller.drop`."""
        generation, self.generation = self.generation, None
        self.is_waiting = False
        if isinstance(generation, m.Plan):
            for number in [part.part for unit in generation.units for part in unit.parts]:
                self.parts.pop(number, None)
                for key in [key for key in self.bound if key[1] == number]:
                    del self.bound[key]

    def on_freeze(self, message):
        self.forget()
        self.frozen = True
        for index in message.lost:
            if index not in self.excluded:
                self.excluded.add(index)
                self.world.part_with(self.index, index)
                self.bound = {key: bound for key, bound in self.bound.items() if key[0] != index}
        for index in message.joined:
            assert index == self.index or not (self.ranks or self.world.nodes[index].ranks) or (
                (self.index, index) in self.world.linked or (index, self.index) in self.world.linked), "not connected"
        self.lost_ranks = self.lost_ranks | frozenset(message.lost_ranks)
        for rank in self.lost_ranks.intersection(self.ranks):
            self.lanes[rank].clear()
        progress = [(number, part.round, self.board[number], part.place if self.ranks else -1)
                    for number, part in self.parts.items()
                    if message.reports_all or (not part.owned and part.owner in message.lost)]
        near = [index for index in range(len(self.world.nodes)) if self.world.near(index, self.index)]
        self.world.tell(self.index, m.FreezeReport(epoch=message.epoch, progress=tuple(progress), near=tuple(near)))

    def on_recover(self, message):
        """As `OwnerTransfer.prepare`; bound memory is written only after the commit."""
        self.prepared, self.awaited, self.unbound = [], [], []
        self.prepare_redone(message)
        for each in message.keepers:
            if self.index in each.lacking:
                self.bind(each.keeper, each.part, ("result", self.parts[each.part].place, each.part), each.round)
        unit_of = {part.part: unit.name for unit in message.units for part in unit.parts}
        for each in message.owner_changes:
            unit, lacks = unit_of[each.part], self.index in each.lacking
            members = self.members(unit)
            if each.giver == self.index:
                self.awaited += [(index, each.part, after(each.kept_round)) for index in each.pushed]
                self.unbound += [(index, each.part) for index in members if index != self.index]
            elif each.giver >= 0 and self.local(unit):
                self.awaited += [(each.giver, each.part, each.kept_round)] * lacks
                self.unbound.append((each.giver, each.part))
            if each.owner == self.index:
                place = self.parts[each.part].place if self.local(unit) else self.index
                self.prepared.append((each, self.own(unit, each.part, place, each.kept_round)))
            elif self.local(unit) or each.giver == self.index:
                self.prepared.append((each, None))
            if self.local(unit) and each.owner != self.index:
                self.expect(each.owner, each, each.kept_round if lacks and each.keeper == each.owner
                            else after(each.kept_round))
            if lacks and each.keeper != each.owner:
                self.expect(each.keeper, each, each.kept_round)
        self.generation = message
        self.is_waiting = True
        self.look()

    def look(self):
        """As `Plans._announce`: writes in flight to or from owners that give up have to arrive first."""
        if self.is_waiting and self.redone_arrived() and all(
                self.bound[index, part][1] != round_ for index, part, round_ in self.awaited):
            self.is_waiting = False
            self.world.tell(self.index, m.Ready(generation=self.generation.generation))

    def expect(self, index, change, round_):
        if not (change.lent and index == change.keeper and self.index in change.lacking):
            self.bind(index, change.part, ("result", self.parts[change.part].place, change.part), round_)

    def begin(self, message):
        self.begin_redone(message)
        for key in self.unbound:
            del self.bound[key]
        for each, fresh in self.prepared:
            if each.giver == self.index:
                self.give_up(each.part, each.owner, each.kept_round)
            elif fresh is not None:
                self.succeed(each.part, fresh, each.kept_round)
            else:
                self.follow(each.part, each.owner, each.kept_round,
                            each.keeper if self.index in each.lacking else None)
        for each in message.keepers:
            if each.keeper == self.index:
                at = ("result", self.parts[each.part].place, each.part, each.round & 1)
                for index in each.lacking:
                    self.world.post(self.index, index, each.part, Write(each.round, at))
            if self.index in each.lacking:
                self.parts[each.part].keeper = each.keeper
        for each in message.owner_changes:
            if each.keeper == self.index and not each.lent:
                at = ("result", self.parts[each.part].place, each.part, each.kept_round & 1)
                for index in each.lacking:
                    self.world.post(self.index, index, each.part, Write(each.kept_round, at))

    # -- ranks are lost: as `RedoneRounds` ------------------------------------------------------------------

    def has_lost(self, unit):
        return not self.lost_ranks.isdisjoint(self.world.ranks_of(unit))

    def prepare_redone(self, message):
        self.redone = [redo for redo in message.redone
                       if redo.part in self.parts and self.has_lost(self.parts[redo.part].unit)]
        self.superseded = [each for redo in self.redone for each in self.under_way(redo)]

    def under_way(self, redo):
        return [(node, redo.part, round_) for to, node, round_ in redo.stale if to == self.index]

    def sums_again(self, redo):
        return redo.was_sent if self.parts[redo.part].owned else self.index in redo.again

    def redone_arrived(self):
        self.superseded = [each for each in self.superseded if not self.has_dropped(each)]
        if self.superseded:
            return False
        for redo in self.redone:
            part, round_ = self.parts[redo.part], after(redo.kept_round)
            if part.owned:
                froms = redo.again
            elif self.index in redo.leaving or not redo.was_sent:
                froms = ()
            else:
                froms = [part.owner]
            for node in froms:
                if (node, redo.part) in self.bound:
                    self.bound[node, redo.part][1] = round_
        return True

    def has_dropped(self, each):
        if each in self.dropped:
            return True
        node, number, round_ = each
        is_wired = not self.world.near(node, self.index)
        if (is_wired and self.bound[node, number][1] == round_) or not self.has_come(node, number, round_):
            return False
        self.drop_early(node, number, round_)
        self.dropped.add(each)
        return True

    def has_come(self, node, number, round_):
        """As `bps_has_come`."""
        for index, part, write in self.world.take_announced(self.index):
            self.early.append((index, part, write.round, write.at))
        part = self.parts[number]
        return (ahead(part.round if part.owned else self.board[number], round_) >= 0
                or (part.owned and ("node", node) in part.arrived and after(part.round) == round_)
                or any(early[:3] == (node, number, round_) for early in self.early))

    def drop_early(self, node, number, round_):
        self.early = [early for early in self.early if early[:3] != (node, number, round_)]

    def begin_redone(self, message):
        gone = {number for number, part in list(self.parts.items())
                if self.has_lost(part.unit) and not self.leave(number, part)}
        for redo in self.redone:
            if redo.part not in gone:
                self.redo(redo.part, redo.kept_round, self.sums_again(redo))
                for node in redo.again if self.parts[redo.part].owned else ():
                    self.await_again(redo.part, node)
        self.dropped.clear()
        if self.lost_ranks > self.told_ranks:
            self.told_ranks = self.lost_ranks
            for unit, first in message.begins:
                if self.names.get(unit) in self.lost_from:
                    self.lost_from[self.names[unit]].append((first, self.lost_ranks))

    def leave(self, number, part):
        """Take lost ranks out of *part*; return whether this node still has inputs of it."""
        members = self.members(part.unit)
        lost = [("rank", rank) for rank in self.ranks if rank in self.lost_ranks]
        lost += [("node", node.index) for node in self.world.nodes
                 if not self.lost_ranks.isdisjoint(node.ranks) and node.index not in members]
        for source in lost:
            if not part.lose(source):
                del self.parts[number]
                for key in [key for key in self.bound if key[1] == number]:
                    del self.bound[key]
                return False
        return True

    def redo(self, number, kept, sums_again):
        """As `bps_redo`."""
        part = self.parts[number]
        assert part.round in (kept, after(kept)), (self.index, number, part.round, kept)
        if self.board[number] == after(kept):
            self.board[number] = kept
        if sums_again and part.round != kept:
            fresh = {("node", node) for redo in self.redone if redo.part == number for node in redo.again}
            assert not part.arrived and set(part.last) >= set(part.sources) - (fresh if part.owned else set()), (
                f"node {self.index} is to sum partition {number} after round {kept} again, and has only the inputs "
                f"{list(part.last)} of {part.sources}")
            part.round, part.arrived, part.last = kept, part.last, {}
        if part.is_kept and ahead(part.kept_round, kept) > 0:
            part.is_kept = False

    def await_again(self, number, node):
        self.parts[number].arrived.pop(("node", node), None)
