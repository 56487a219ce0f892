"""The scheduler is lost at any moment, or a node is cut off from it: the real decisions, old and new, and real control
logs.

As in `test_recovery_model` nodes do as the engine does, helpers die, and whatever is under way comes late. All that a
node and a scheduler had said to each other and not read is lost with their connection.
"""
from __future__ import annotations

from collections import deque
from random import Random

from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, precondition, rule

from bpsfast.orchestration import long_lists, messages as m
from bpsfast.orchestration.failover.control_log import ControlLog
from bpsfast.orchestration.failover.scheduler_state import SchedulerState
from tests.orchestration.test_recovery_model import APART, TOGETHER, World
from tests.support.job_table import join
from tests.support.lossy_nodes import ROUNDS, ModelNode


class Orphans(World):
    """A world that loses schedulers, too."""

    @initialize(shape=st.sampled_from(APART + TOGETHER), policy=st.sampled_from(["optimal", "ps"]),
                first_round=st.sampled_from([0, ROUNDS - 3]), inline=st.sampled_from([0, long_lists.MOST_INLINE]))
    def start(self, shape, policy, first_round, inline=long_lists.MOST_INLINE):
        self.before, long_lists.MOST_INLINE = long_lists.MOST_INLINE, inline  # 0: every list counts as a long one
        self.control_logs, self.n_connections, self.n_first = {}, 0, len(shape)
        self.welcomed = set(range(len(shape)))
        super().start(shape, policy, first_round)
        scheduler_state = SchedulerState(self.table.job.settings, 0.0)
        for index in range(len(shape)):
            self.control_log(index)
        scheduler_state.job, self.table.job = self.table.job, scheduler_state

    def control_log(self, index):
        if index not in self.control_logs:
            self.control_logs[index] = ControlLog("1.0", {"transport": "tcp"})
            if index < self.n_first:  # others are welcomed later
                self.control_logs[index].heard(m.Welcome(index=index, epoch=1, nodes=self.infos))
        return self.control_logs[index]

    @property
    def infos(self):
        return self.job.roster.nodes

    def tell(self, index, message):
        message = long_lists.with_digest(message) if isinstance(message, m.Declare) else message
        self.control_log(index).said(message)
        super().tell(index, message)

    def hear_of(self, index):
        self.table.say(self.senders[index], long_lists.as_sent(self.up[index].popleft()))

    def let_hear(self, node):
        message = self.inbox(node).pop(0)
        if isinstance(message, m.Welcome):
            self.welcomed.add(node.index)
        self.control_log(node.index).heard(message)
        if isinstance(message, m.RejoinRequest):
            self.up[node.index].extend(self.control_log(node.index).report(message.number))
        elif isinstance(message, m.ListWanted):
            self.up[node.index].extend(long_lists.pieces(message.digest,
                                                         self.control_log(node.index).list_of(message.digest)))
        elif isinstance(message, m.Resume):
            node.forget()
        else:
            node.hear(message)

    def dial(self, index):
        """Nothing that was under way between node *index* and its scheduler arrives any more; it dials anew."""
        self.n_connections += 1
        self.senders[index] = b"%d#%d" % (index, self.n_connections)
        if index not in self.welcomed:  # a newcomer is given up that nobody expects yet
            self.nodes[index].alive = False
        self.up[index] = deque(self.control_log(index).report() if self.nodes[index].alive else ())

    @precondition(lambda self: not self.table.job.over)  # nobody dials after its end
    @rule()
    def lose_the_scheduler(self):
        self.table.job = SchedulerState(self.table.job._settings, self.table.now)
        for index, node in enumerate(self.nodes):
            self.dial(index)
            if not node.alive:
                self.unnoticed.add(index)

    @rule(number=st.integers(0, 5))
    def cut_off(self, number):
        alive = [index for index, node in enumerate(self.nodes) if node.alive]
        if alive:  # else the job has ended
            self.dial(alive[number % len(alive)])

    @precondition(lambda self: not self.table.job.over and self.table.job._rebuilding is None and (
        0 < len(self.table.job.job.roster.nodes) < 8))
    @rule(host=st.sampled_from("abxy"), seed=st.integers(0, 1 << 30), n_steps=st.integers(0, 150))
    def come(self, host, seed, n_steps):
        """As there; but the index of one that was left behind, and that nobody had heard of, is given again."""
        index = len(self.table.job.job.roster.nodes)
        if index < len(self.nodes):
            self.nodes[index].alive = False
            self.unnoticed.discard(index)
            self.welcomed.discard(index)
            self.dialled.discard(index)
            self.control_logs.pop(index, None)
            for pairs in (self.expected, self.linked):
                pairs -= {pair for pair in pairs if index in pair}
            self.parted -= {pair for pair in self.parted if index in pair}
            self.up[index].clear()
        else:
            for each in (self.hosts, self.senders, self.up, self.nodes):
                each.append(None)
        self.n_connections += 1
        self.hosts[index] = host if host in self.hosts[:self.n_first] else f"new {self.n_connections}"
        self.senders[index] = b"%d#%d" % (index, self.n_connections)
        self.up[index] = deque()
        self.nodes[index] = ModelNode(self, index, ())
        self.table.say(self.senders[index], join(host, 0, pid=self.n_connections, settings={"transport": "tcp"}))
        self.limit += 2
        self.go_on(Random(seed), n_steps)

    @rule(number=st.integers(0, 4), who=st.integers(0, 2))
    def lose_sight(self, number, who):
        """As there, of who is known: a worker may not have been told of a newcomer before the scheduler was lost."""
        worker = self.members("w")[who % len(self.members("w"))]
        if self.helper(number) < len(next(self.control_log(worker).report()).nodes):
            super().lose_sight(number, who)

    @rule()
    def notice(self):
        """The scheduler sees the ends of connections; one that is just there, who does not come in time."""
        for _ in range(6 if self.unnoticed else 0):  # a lease, should nodes have to be recalled twice before
            for index, node in enumerate(self.nodes):
                while self.up[index]:
                    self.hear_of(index)
                while node.alive and self.inbox(node):
                    self.let_hear(node)
            for index in self.unnoticed:
                self.table.post(self.table.job.unreachable(self.table.now, self.senders[index]))
            for index in [index for index, node in enumerate(self.nodes) if node.alive]:
                self.table.say(self.senders[index], m.Heartbeat(sequence=1))
            self.table.tick(self.table.now + 4.0)
        self.unnoticed.clear()

    def teardown(self):
        long_lists.MOST_INLINE = getattr(self, "before", long_lists.MOST_INLINE)
        if hasattr(self, "limit"):
            for index, node in enumerate(self.nodes):
                if not node.alive:
                    self.unnoticed.add(index)
            self.notice()
            self.slow.clear()
            self.go_on(Random(self.limit))
            assert self.table.job.over or self.table.job._rebuilding is None
            self.table.job = self.table.job.job
        super().teardown()
        if hasattr(self, "limit") and not self.table.job.over:
            reports = [list(log.report()) for index, log in self.control_logs.items() if index < self.n_first
                        and self.nodes[index].alive]
            kept = [[unit for each in said if isinstance(each, m.CommittedUnits) for unit in each.units]
                    for said in reports]
            assert all(each == kept[0] for each in kept) and len(kept[0]) == 2
            assert all(said[0].committed == reports[0][0].committed for said in reports)


def test_a_scheduler_is_lost_between_a_commit_and_its_last_reader():
    """Half of the nodes have read the commit: the others get it from the next scheduler, and both the same units."""
    world = Orphans()
    world.start(APART[0], "ps", 0)
    while not world.inbox(world.nodes[0]) or not isinstance(world.inbox(world.nodes[0])[0], m.Commit):
        for index in range(len(world.nodes)):
            while world.up[index]:
                world.hear_of(index)
        for node in world.nodes:
            if world.inbox(node) and not isinstance(world.inbox(node)[0], m.Commit):
                world.let_hear(node)
    world.let_hear(world.nodes[0])
    world.let_hear(world.nodes[2])
    world.lose_the_scheduler()
    world.go_on(Random(1))
    assert all(node.units for node in world.nodes[:2])
    world.teardown()


def test_a_worker_that_was_never_told_of_a_newcomer_numbers_the_next_one_as_others_do():
    """One worker has read that a helper comes, the other not when all are recalled: that helper is lost to both."""
    world = Orphans()
    world.start(APART[0], "optimal", 0)
    world.go_on(Random(1))
    world.come("x", seed=0, n_steps=0)
    while world.inbox(world.nodes[0]):
        world.let_hear(world.nodes[0])
    world.cut_off(number=1)
    world.go_on(Random(1))
    assert [len(next(world.control_log(worker).report()).nodes) for worker in (0, 1)] == [5, 5]
    world.come("y", seed=0, n_steps=10_000)
    for worker in (0, 1):
        assert [node.index for node in next(world.control_log(worker).report()).nodes] == list(range(6))
    world.lose_the_scheduler()
    world.teardown()
    assert not world.table.job.over and world.table.job.roster.lost == {4}


def test_a_newcomer_does_not_call_one_lost_that_came_at_the_same_time():
    """The one that is taken in later is not there when the other one is, and has to know it as lost no more."""
    world = Orphans()
    world.start(APART[0], "optimal", 0)
    world.go_on(Random(1))
    world.come("x", seed=0, n_steps=0)
    world.come("y", seed=0, n_steps=0)
    for worker in (0, 1):
        while world.inbox(world.nodes[worker]):
            world.let_hear(world.nodes[worker])
        while world.up[worker]:
            world.hear_of(worker)
    world.go_on(Random(1), without=5)
    assert world.table.job.job.roster.absent == {5}
    world.go_on(Random(1))
    assert world.table.job.job.roster.absent == set() and next(world.control_log(5).report()).lost == ()
    world.lose_the_scheduler()
    world.teardown()
    assert not world.table.job.over and world.table.job.roster.absent == set()


def test_only_one_that_came_late_has_read_who_inherits_what():
    """It was never told of the unit before, but by that commit; those who have it from the start are behind."""
    world = Orphans()
    world.start(APART[0], "optimal", 0)
    world.declare()
    world.go_on(Random(1))
    world.come("x", seed=0, n_steps=10_000)
    world.die(number=0, at_once=False)
    world.unnoticed.clear()
    world.table.post(world.table.job.unreachable(0.0, world.senders[2]))
    world.table.say(world.senders[0], m.ProbeResult(node=2, outcome="refused"))
    while not any(isinstance(message, m.Commit) for message in world.inbox(world.nodes[4])):
        for index, node in enumerate(world.nodes):
            while world.up[index]:
                world.hear_of(index)
            if node.alive and world.inbox(node) and not isinstance(world.inbox(node)[0], m.Commit):
                world.let_hear(node)
    world.let_hear(world.nodes[4])
    world.lose_the_scheduler()
    world.notice()
    owners = {part.owner for unit in world.table.job.job._generations.units for part in unit.parts}
    assert 2 not in owners
    world.come("y", seed=0, n_steps=10_000)
    world.teardown()
    assert not world.table.job.over


TestOrphans = Orphans.TestCase
TestOrphans.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)
