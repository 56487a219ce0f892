"""Model of the nodes of a job, without bytes, which tracks every input, partial and result.

A `ModelNode` does what `pyx/core.h`, `pyx/owner_change.h`, `node/recovery.py` and `node/owner_changes.py` do. Memory is
a table of contents. A write delivers the contents of its source at its arrival, so premature reuse of memory is
detected, and it must have the round that its slot expects, as with RDMA. Nodes of one host announce addresses, and read
results in the owner's memory.
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

    def __init__(self, sources, owner, owned, round_, place, unit):
        self.sources, self.owner, self.owned, self.round = sources, owner, owned, round_
        self.place = place  # the node in whose memory the result is read or summed
        self.unit = unit
        self.arrived, self.last = {}, {}
        self.is_kept, self.keeper, self.kept_round = False, -1, -1
        self.committed = False

    def next_round(self):
        self.round = after(self.round)
        self.last, self.arrived = self.arrived, {}


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
        assert total == self.world.right(part.unit, round_), f"partition {number}, round {round_}: {total}"
        at = ("result", part.place, number, round_ & 1)
        self.world.memory[at] = total
        part.next_round()
        self.board[number] = round_
        for member in self.world.members(part.unit):
            if member != self.index:
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

    def local(self, unit):
        return [rank for rank in self.ranks if rank in self.world.ranks_of(unit)]

    def sources(self, unit, owned):
        members = self.world.members(unit) if owned else [self.index]
        return [source for index in members for source in (
            [("rank", rank) for rank in self.local(unit)] if index == self.index else [("node", index)])]

    def bind(self, index, number, at, round_):
        if not self.world.near(index, self.index):
            self.bound[index, number] = [at, round_]

    def own(self, unit, number, place, round_):
        for index in self.world.members(unit):
            if index != self.index:
                self.bind(index, number, ("slot", self.index, index, number), after(round_))
        return Part(self.sources(unit, True), -1, True, round_, place, unit)

    def on_joined(self, message):
        self.world.tell(self.index, m.NewcomerReady(node=message.node.index))
        self.world.expected.add((self.index, message.node.index))

    def on_welcome(self, message):
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
        progress = [(number, part.round, self.board[number], part.place if self.local(part.unit) else -1)
                    for number, part in self.parts.items()
                    if message.joined or (not part.owned and part.owner in message.lost)]
        near = [index for index in range(len(self.world.nodes)) if self.world.near(index, self.index)]
        self.world.tell(self.index, m.FreezeReport(epoch=message.epoch, progress=tuple(progress), near=tuple(near)))

    def on_recover(self, message):
        """As `Succession.prepare`; bound memory is written only after the commit."""
        self.prepared, self.awaited, self.unbound = [], [], []
        unit_of = {part.part: unit.name for unit in message.units for part in unit.parts}
        for each in message.owner_changes:
            unit, lacks = unit_of[each.part], self.index in each.lacking
            members = self.world.members(unit)
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
        if self.is_waiting and all(self.bound[index, part][1] != round_ for index, part, round_ in self.awaited):
            self.is_waiting = False
            self.world.tell(self.index, m.Ready(generation=self.generation.generation))

    def expect(self, index, change, round_):
        if not (change.lent and index == change.keeper and self.index in change.lacking):
            self.bind(index, change.part, ("result", self.parts[change.part].place, change.part), round_)

    def begin(self, message):
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
        for each in message.owner_changes:
            if each.keeper == self.index and not each.lent:
                at = ("result", self.parts[each.part].place, each.part, each.kept_round & 1)
                for index in each.lacking:
                    self.world.post(self.index, index, each.part, Write(each.kept_round, at))
