"""Recovery at any moment: the real scheduler's decisions, nodes that do as the engine does, whatever is under way late.

Helpers die, or workers lose sight of them, having sent partials and results to any of the others, while the others
freeze, prepare and commit, once and again; others come, at any moment, and some of those die as well. Every sum has
each rank's input once, results stay what they are for as long as ranks may read them, and if no more helpers are lost
all ranks complete all rounds, and who has come takes part.
"""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bpsfast.orchestration import messages as m
from tests.support.job_table import Table, join, spec
from tests.support.lossy_nodes import ROUNDS, ModelNode, after

#: (host, ranks) of each node, those with ranks first.
APART = ([("a", 1), ("b", 1), ("h", 0), ("i", 0)],
         [("a", 2), ("b", 1), ("h", 0), ("i", 0)],
         [("a", 1), ("b", 2), ("c", 1), ("h", 0), ("i", 0), ("j", 0)])
#: Some share a host: they announce instead of writing, and read in each other's memory.
TOGETHER = ([("a", 1), ("a", 2), ("a", 0), ("a", 0)],
            [("a", 1), ("a", 1), ("b", 1), ("a", 0), ("c", 0)],
            [("a", 2), ("b", 1), ("a", 0), ("b", 0)])
#: Why a job may end all the same: nodes of one host cannot send each other results, or write where the others read.
IN_VAIN = ("cannot reach nodes", "nobody can go on with partition")


class World(RuleBasedStateMachine):
    """A job, its nodes, and all that is under way between them: in order from one to another, of one partition."""

    names = "wx"  # of the units, in the order of their declarations
    declared = len(names)  # nothing to be declared before the start
    node_type = ModelNode
    fields: Mapping[str, int] = MappingProxyType({})  # further settings of the job

    @property
    def job(self):
        """The job; the table has it, or the scheduler's state, which has it."""
        return getattr(self.table.job, "job", self.table.job)

    @initialize(shape=st.sampled_from(APART + TOGETHER), policy=st.sampled_from(["optimal", "ps"]),
                first_round=st.sampled_from([0, ROUNDS - 3]))
    def start(self, shape, policy, first_round):
        self.hosts, self.first_round = [host for host, _ in shape], first_round
        n_helpers = sum(n == 0 for _, n in shape)
        self.table = Table(num_nodes=len(shape) - n_helpers, num_helpers=n_helpers, max_helpers=64, placement=policy,
                           partition_nbytes=4096, fusion_nbytes=0, **self.fields)
        self.senders = [b"%d" % index for index in range(len(shape))]
        for sender, (_, n_ranks) in zip(self.senders, shape):
            self.table.say(sender, join(sender.decode(), n_ranks))
        welcome = self.table.got(self.senders[0], m.Welcome)[0]
        self.nodes = [self.node_type(self, node.index, node.ranks) for node in welcome.nodes]
        self.home = {rank: node for node in self.nodes for rank in node.ranks}
        self.ranks = sorted(self.home)
        self.up = [deque() for _ in self.nodes]  # to the scheduler
        self.wires = defaultdict(deque)  # (from, to, partition)
        self.memory, self.pushed, self.limit = {}, {}, 2
        self.unnoticed, self.parted, self.slow = set(), set(), set()
        self.expected, self.dialled, self.linked = set(), set(), set()  # pairs; nodes; pairs: (worker, newcomer)
        self.declared = 0
        self.declare()

    # -- what vertices ask of the world ---------------------------------------------------------------------

    def near(self, one, other):
        return one != other and self.hosts[one] == self.hosts[other]

    def ranks_of(self, unit):
        """All push "w", only some "x"."""
        return self.ranks if unit == "w" else [rank for rank in self.ranks if self.home[rank].index != 1]

    def members(self, unit):
        return [node.index for node in self.nodes if node.local(unit)]

    def right(self, unit, round_):
        return tuple((rank, round_) for rank in self.ranks_of(unit))

    def require_sum(self, number, unit, round_, total):
        assert total == self.right(unit, round_), f"partition {number}, round {round_}: {total}"

    def take_announced(self, to):
        """Return (node, partition, announcement) of all that nodes of the host of node *to* have announced to it."""
        return [(index, number, writes.popleft()) for (index, other, number), writes in sorted(self.wires.items())
                if other == to and self.near(index, to) for _ in range(len(writes))]

    def post(self, index, to, part, write):
        if frozenset((index, to)) not in self.parted:
            self.wires[index, to, part].append(write)

    def tell(self, index, message):
        self.up[index].append(message)

    def end_process(self, index):
        if self.nodes[index].alive:
            self.nodes[index].alive = False
            self.unnoticed.add(index)

    def part_with(self, index, lost):
        self.cut(index, lost)
        if self.near(index, lost):
            self.end_process(lost)

    def cut(self, *pair):
        self.parted.add(frozenset(pair))
        for key in [key for key in self.wires if {*key[:2]} == {*pair}]:
            del self.wires[key]

    # -- what can happen next -------------------------------------------------------------------------------

    def inbox(self, node):
        return self.table.inbox[self.senders[node.index]]

    def possible(self):
        """Return what can happen next: (node that it happens at, call)."""
        found = [(-1, self.hear_of, index) for index, messages in enumerate(self.up) if messages]
        for node in self.nodes:
            if node.alive and self.inbox(node):
                found.append((node.index, self.let_hear, node))
            if node.alive and not node.frozen:
                found += [(node.index, node.run_part, part) for part in node.queued]
                found += [(node.index, node.drain, rank) for rank, lane in node.lanes.items() if lane]
            found += self.pushes(node)
        found += [(to, self.deliver, index, to, part) for (index, to, part), writes in sorted(self.wires.items())
                  if writes and (index, to) not in self.slow and self.nodes[to].alive
                  and not (self.near(index, to) and self.nodes[to].frozen)]
        found += [(other, self.connect, worker, other) for worker, other in sorted(self.expected - self.linked)
                  if other in self.dialled and self.nodes[worker].alive and self.nodes[other].alive]
        return found

    def pushes(self, node):
        return [(node.index, self.push, rank, unit) for unit in node.units for rank in node.local(unit)
                if self.may_push(node, rank, unit)]

    def connect(self, worker, newcomer):
        """Their connections are there, as both say."""
        self.linked.add((worker, newcomer))
        self.tell(worker, m.NewcomerReady(node=newcomer, is_linked=True))
        if all((node.index, newcomer) in self.linked for node in self.nodes
               if node.ranks and node.index not in self.nodes[newcomer].gone):
            self.tell(newcomer, m.NewcomerReady(node=newcomer, is_linked=True))

    def hear_of(self, index):
        self.table.say(self.senders[index], self.up[index].popleft())

    def let_hear(self, node):
        node.hear(self.inbox(node).pop(0))

    def deliver(self, index, to, part):
        self.nodes[to].come(index, part, self.wires[index, to, part].popleft())

    def may_push(self, node, rank, unit):
        round_ = self.pushed.get((rank, unit), self.first_round)
        return (round_ != after(self.first_round, self.limit)
                and all(node.board[part] == round_ for part in node.units[unit]))

    def push(self, rank, unit):
        node = self.home[rank]
        self.results_stay(rank, unit)
        round_ = self.pushed[rank, unit] = after(self.pushed.get((rank, unit), self.first_round))
        for part in node.units[unit]:
            self.memory["input", rank, part] = ((rank, round_),)
            node.lanes[rank].append((part, round_))

    def go_on(self, random, n_steps=10_000, without=-2):
        """Let anything happen, but nothing at node *without* (-1: the scheduler), until nothing can."""
        for _ in range(n_steps):
            possible = [each for each in self.possible() if each[0] != without]
            if not possible or self.table.job.over:
                return
            _, call, *arguments = random.choice(possible)
            call(*arguments)

    # -- rules ----------------------------------------------------------------------------------------------

    def helper(self, number):
        helpers = [node.index for node in self.nodes if not node.ranks]
        return helpers[number % len(helpers)]

    @precondition(lambda self: self.declared < len(self.names))
    @rule()
    def declare(self):
        name = self.names[self.declared]
        self.declared += 1
        for node in self.nodes:
            for rank in node.local(name):
                ranks = () if name == "w" else tuple(self.ranks_of(name))
                self.tell(node.index, m.Declare(rank=rank, tensors=(spec(name, shape=(4096,), ranks=ranks),)))

    @rule(seed=st.integers(0, 1 << 30), n_steps=st.integers(1, 60), without=st.integers(-2, 5))
    def some_steps(self, seed, n_steps, without):
        self.go_on(Random(seed), n_steps, without)

    @rule(seed=st.integers(0, 1 << 30), without=st.integers(-2, 5))
    def all_steps(self, seed, without):
        self.limit += 1
        self.go_on(Random(seed), without=without)

    @rule(other=st.integers(0, 2), one=st.none() | st.integers(0, 5))
    def hold_up(self, other, one):
        """Nothing of node *one*, or of any, arrives at a worker, until `release`."""
        worker = self.members("w")[other % len(self.members("w"))]
        self.slow |= {(index, worker) for index in range(len(self.nodes)) if one is None or index == one}

    @rule()
    def release(self):
        self.slow.clear()

    @precondition(lambda self: len(self.nodes) < 8)
    @rule(host=st.sampled_from("abxy"), seed=st.integers(0, 1 << 30), n_steps=st.integers(0, 150))
    def come(self, host, seed, n_steps):
        """A helper that is started while the job runs, and goes on."""
        index = len(self.nodes)
        self.hosts.append(host if len(set(self.hosts)) < len(self.hosts) else f"new {index}")
        self.senders.append(b"%d" % index)
        self.up.append(deque())
        self.nodes.append(self.node_type(self, index, ()))
        self.table.say(self.senders[-1], join(host, 0))
        self.limit += 2
        self.go_on(Random(seed), n_steps)

    @rule(number=st.integers(0, 4), at_once=st.booleans())
    def die(self, number, at_once):
        self.end_process(self.helper(number))
        if at_once:
            self.notice()

    @rule()
    def notice(self):
        """The scheduler sees the ends of connections."""
        while self.unnoticed:
            self.table.post(self.table.job.unreachable(0.0, self.senders[self.unnoticed.pop()]))

    @rule(number=st.integers(0, 4), who=st.integers(0, 2))
    def lose_sight(self, number, who):
        """A worker and a helper do not reach each other any more; neither need be dead."""
        lost = self.helper(number)
        worker = self.members("w")[who % len(self.members("w"))]
        if lost not in self.nodes[worker].excluded:
            self.cut(worker, lost)
            self.tell(worker, m.Lost(who=f"node {lost}", reason="its connection has ended"))

    def results_stay(self, rank, unit):
        """What a rank may read is right: the last complete round, and the one before until it pushes again."""
        if (rank, unit) in self.pushed:
            node, round_ = self.home[rank], self.pushed[rank, unit]
            for part in node.units[unit]:
                for each in [after(round_, -1)] + [round_] * (node.board[part] == round_):
                    at = "result", node.parts[part].place, part, each & 1
                    assert each == self.first_round or self.memory[at] == self.right(unit, each), (at, self.memory[at])

    @invariant()
    def all_results_stay(self):
        for rank, unit in getattr(self, "pushed", ()):
            self.results_stay(rank, unit)

    @invariant()
    def the_job_goes_on(self):
        aborted = self.job.aborted if hasattr(self, "table") else None
        if aborted is not None:
            assert len(set(self.hosts)) < len(self.hosts), aborted
            assert any(words in aborted.reason for words in IN_VAIN), aborted

    def teardown(self):
        if not hasattr(self, "limit"):
            return
        while self.declared < len(self.names):
            self.declare()
        self.limit += 2
        self.slow.clear()
        self.go_on(Random(self.limit))
        while self.unnoticed and not self.table.job.over:
            self.notice()
            self.go_on(Random(self.limit))
        self.the_job_goes_on()
        if not self.table.job.over:
            self.all_is_done()
            losses = self.job._losses
            assert losses.recovery is None and not losses._without_share
            waiting = [index for index in self.job.roster.joining if self.nodes[index].alive]
            assert not waiting, f"nodes {waiting} were never taken in"

    def all_is_done(self):
        last = after(self.first_round, self.limit)
        for node in self.nodes:
            for part in [part for unit, parts in node.units.items() for part in parts if node.local(unit)]:
                assert node.board[part] == last, f"node {node.index} waits for partition {part} for ever"
        assert len(self.pushed) == len(self.ranks_of("w")) + len(self.ranks_of("x"))


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("helper", range(3))
@pytest.mark.parametrize("worker", range(3))
def test_who_still_awaits_a_lent_result_gets_it_though_a_helper_comes_at_once(worker, helper):
    """The new owner of a lost helper's parts never had that result to send: it cannot promise it when it gives up."""
    world = World()
    world.start(shape=APART[2], policy="ps", first_round=0)
    world.declare()
    world.all_steps(seed=helper, without=-2)
    world.hold_up(other=worker, one=None)
    world.all_steps(seed=helper, without=-2)
    world.die(number=helper, at_once=True)
    world.go_on(Random(helper))
    generations = world.table.job._generations
    assert worker in [index for each in generations.changes.values() for index in each.lacking]
    world.come(host="x", seed=helper, n_steps=10_000)
    world.release()
    world.teardown()
    assert not world.table.job.over
