"""A random walk over whole jobs: the real decisions, messages in any order, what must hold at every step."""
from __future__ import annotations

from collections import defaultdict

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.job.admission import JobSettings
from bpsfast.orchestration.job.job import Job
from tests.support.job_table import join, spec

HOSTS = {b"A": ("a", 2), b"B": ("b", 1), b"C": ("c", 3), b"H": ("h", 0), b"I": ("i", 0)}
NAMES = ("w", "x", "y", "z")


class Walk(RuleBasedStateMachine):
    """Five nodes talk to a real job in any order; links keep their order and delay as they like."""

    def __init__(self):
        super().__init__()
        self.job = Job(JobSettings(num_nodes=3, num_helpers=2, fusion_nbytes=8192, partition_nbytes=4096), 0.0)
        self.now = 0.0
        self.log = defaultdict(list)  # what each node was sent
        self.seen = defaultdict(int)  # how much of it each has read
        self.ready = defaultdict(set)  # generation -> nodes that said so
        self.failed = set()
        self.declared = defaultdict(list)  # rank -> names
        self.entered = defaultdict(int)  # rank -> barriers
        self.left = set()
        self.ranks = {}
        self.gone = set()  # helpers that the job does without

    @initialize(order=st.permutations(sorted(HOSTS)), n_late=st.integers(0, 2))
    def start(self, order, n_late):
        self.order = list(order)
        while len(self.order) > n_late:
            self.join()

    def post(self, outgoing):
        for destination, message in outgoing:
            if isinstance(message, m.Abort) and message.goes_on:
                assert not HOSTS[destination][1], "it has ranks"
                self.gone.add(destination)
            if isinstance(message, m.Commit):
                assert self.ready[message.generation] == set(HOSTS) - self.gone, "committed without all being ready"
                assert message.generation not in self.failed
            if isinstance(message, m.BarrierDone):
                ranks = [rank for owned in self.ranks.values() for rank in owned]
                assert all(self.entered[rank] >= message.sequence for rank in ranks)
            self.log[destination].append(message)

    def say(self, sender, message):
        over = self.job.over
        outgoing = self.job.receive(self.now, sender, message)
        assert sender not in self.gone or all(destination == sender for destination, _ in outgoing), "it is no member"
        assert not over or all(isinstance(answer, m.Abort | m.Refuse) for _, answer in outgoing)
        self.post(outgoing)

    @precondition(lambda self: len(self.order) > 0)
    @rule()
    def join(self):
        sender = self.order.pop()
        host, n_ranks = HOSTS[sender]
        self.say(sender, join(host, n_ranks))

    @rule(sender=st.sampled_from(sorted(HOSTS)), fail=st.integers(0, 9))
    def read(self, sender, fail):
        """Let *sender* read its next message and answer as a node does."""
        if self.seen[sender] == len(self.log[sender]):
            return
        message = self.log[sender][self.seen[sender]]
        self.seen[sender] += 1
        if isinstance(message, m.Welcome):
            self.ranks[sender] = message.nodes[message.index].ranks
        elif isinstance(message, m.Plan) and fail == 0:
            self.failed.add(message.generation)
            self.say(sender, m.PrepareFailed(generation=message.generation, reason="no memory"))
        elif isinstance(message, m.Plan):
            self.ready[message.generation].add(sender)
            self.say(sender, m.Ready(generation=message.generation))
        elif isinstance(message, m.StallReportRequest):
            self.say(sender, m.StallReport(part=message.part, round=message.round, stage="done",
                                           missing_ranks=(), missing_nodes=()))

    @rule(senders=st.permutations(sorted(HOSTS)), fail=st.integers(0, 5))
    def read_all(self, senders, fail):
        for i, sender in enumerate(senders):
            while self.seen[sender] < len(self.log[sender]):
                self.read(sender, fail=0 if (i, fail) == (4, 0) else 1)

    def rank_of(self, sender, number):
        owned = [rank for rank in self.ranks.get(sender, ()) if rank not in self.left]
        return owned[number % len(owned)] if owned else None

    @rule(sender=st.sampled_from(sorted(HOSTS)), number=st.integers(0, 2), name=st.sampled_from(NAMES),
          wrong=st.integers(0, 9))
    def declare(self, sender, number, name, wrong):
        rank = self.rank_of(sender, number)
        if rank is not None and name not in self.declared[rank]:
            self.declared[rank].append(name)
            dtype = "int8" if wrong == 0 else "float32"
            self.say(sender, m.Declare(rank=rank, tensors=(spec(name, shape=(1500,), dtype=dtype),)))

    @rule(name=st.sampled_from(NAMES), senders=st.permutations(sorted(HOSTS)))
    def declare_all(self, name, senders):
        for sender in senders:
            for number in range(len(self.ranks.get(sender, ()))):
                self.declare(sender, number, name, wrong=1)

    @rule(senders=st.permutations(sorted(HOSTS)))
    def barrier_all(self, senders):
        for sender in senders:
            for number in range(len(self.ranks.get(sender, ()))):
                self.barrier(sender, number)

    @rule(sender=st.sampled_from(sorted(HOSTS)), number=st.integers(0, 2))
    def barrier(self, sender, number):
        rank = self.rank_of(sender, number)
        done = sum(isinstance(message, m.BarrierDone) for message in self.log[sender])
        if rank is not None and self.entered[rank] == done:
            self.entered[rank] += 1
            self.say(sender, m.BarrierEnter(rank=rank, sequence=self.entered[rank]))

    @precondition(lambda self: self.now > 3)
    @rule(sender=st.sampled_from(sorted(HOSTS)), number=st.integers(0, 2))
    def leave(self, sender, number):
        rank = self.rank_of(sender, number)
        if rank is not None:
            self.left.add(rank)
            self.say(sender, m.RankLeft(rank=rank))

    @rule(sender=st.sampled_from(sorted(HOSTS)), number=st.integers(0, 2), part=st.integers(-1, 3))
    def stall(self, sender, number, part):
        rank = self.rank_of(sender, number)
        if rank is not None:
            self.say(sender, m.StallQuestion(rank=rank, question=1, part=part, round=1, name="w"))

    @rule()
    def second_passes(self):
        self.now += 1.0
        for sender in HOSTS:
            self.say(sender, m.Heartbeat(sequence=1))
        self.post(self.job.tick(self.now))

    @precondition(lambda self: self.now > 12)
    @rule(sender=st.sampled_from(sorted(HOSTS)))
    def lose(self, sender):
        self.say(sender, m.Lost(who="rank 0", reason="killed"))

    def members(self):
        """Return who has joined and belongs to the job."""
        return [sender for sender in HOSTS if sender not in self.order and sender not in self.gone]

    @invariant()
    def everybody_is_told_the_same(self):
        for kinds in ((m.Plan, m.Commit), (m.BarrierDone,), (m.Abort,), (m.Finish,)):
            told = {tuple(message for message in self.log[sender] if isinstance(message, kinds))
                    for sender in self.members()}
            assert len(told) <= 1
        welcomes = [message for log in self.log.values() for message in log if isinstance(message, m.Welcome)]
        assert len({welcome.nodes for welcome in welcomes}) <= 1

    @invariant()
    def one_generation_is_in_flight(self):
        in_flight = 0
        for message in self.log[b"A"]:
            if isinstance(message, m.Plan):
                in_flight += 1
            elif isinstance(message, m.Commit) or getattr(message, "error", "") == "CapacityError":
                in_flight -= 1
            assert 0 <= in_flight <= 1

    @invariant()
    def the_end_is_the_end(self):
        if self.job.aborted is not None:
            assert all(self.log[sender].count(self.job.aborted) == 1 for sender in self.members() if self.log[sender])
        if self.job.finished:
            assert len(self.left) == 6 and all(self.log[sender][-1] == m.Finish() for sender in self.members())

    @invariant()
    def owners_and_order_fit_the_plans(self):
        parts = set()
        for message in self.log[b"A"]:
            if isinstance(message, m.Plan):
                numbers = {part.part for unit in message.units for part in unit.parts}
                assert not numbers & parts, "a partition number was used twice"
                parts |= numbers
            if isinstance(message, m.Commit):
                assert sorted(message.order) == list(range(len(message.order)))


def test_a_gathering_job_lets_go_of_a_helper_that_reports_a_loss():
    """And tells nobody else; it goes on gathering."""
    walk = Walk()
    walk.start([b"A", b"B", b"C", b"H", b"I"], n_late=1)
    walk.lose(b"H")
    assert walk.gone == {b"H"} and walk.job.aborted is None
    walk.join()
    walk.second_passes()
    walk.everybody_is_told_the_same()
    walk.the_end_is_the_end()
    assert walk.job.aborted is None


Walk.TestCase.settings = settings(max_examples=60, stateful_step_count=120, deadline=None)
TestWalk = Walk.TestCase
