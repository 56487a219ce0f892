"""The scheduler's decisions: tables for each, and a random walk over whole jobs."""
from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.job import Job, JobSettings
from bpsfast.orchestration.messages import TensorSpec


def join(host="a", n_ranks=1, **fields):
    base = dict(version=m.VERSION, package="1.0", host=host, pid=1, index=-1, ranks=(-1,) * n_ranks, server_processes=0,
                address=f"{host}:1", shm_name="", nic_rate_bytes=0.0, settings={"transport": "tcp"})
    return m.Join(**{**base, **fields})


def spec(name, **fields):
    return TensorSpec(**{"name": name, "dtype": "float32", "shape": (1024,), **fields})


class Table:
    """A job with the messages that each node has been sent, in order."""

    def __init__(self, **fields):
        self.job = Job(JobSettings(**{"num_nodes": 2, **fields}), 0.0)
        self.now = 0.0
        self.inbox = defaultdict(list)

    def post(self, outgoing):
        for destination, message in outgoing:
            self.inbox[destination].append(message)

    def say(self, sender, *spoken):
        for message in spoken:
            self.post(self.job.receive(self.now, sender, message))

    def tick(self, to):
        self.now = to
        self.post(self.job.tick(to))

    def got(self, sender, kind):
        """The messages of *kind* that *sender* was sent since the last call."""
        found = [message for message in self.inbox[sender] if isinstance(message, kind)]
        self.inbox[sender] = [message for message in self.inbox[sender] if not isinstance(message, kind)]
        return found


def welcomed(**fields):
    """Two nodes of two ranks and one helper, admitted."""
    table = Table(num_helpers=1, **fields)
    table.say(b"A", join("a", 2))
    table.say(b"H", join("h", 0))
    table.say(b"B", join("b", 2))
    return table


def committed(*names):
    """The same with *names* committed."""
    table = welcomed()
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=tuple(map(spec, names))) for rank in ranks))
    for sender in (b"A", b"B", b"H"):
        table.say(sender, m.Ready(generation=1))
        assert len(table.got(sender, m.Plan)) == 1
    for sender in (b"A", b"B", b"H"):
        assert len(table.got(sender, m.Commit)) == 1
    return table


ALL = (b"A", b"B", b"H")


# -- joining ----------------------------------------------------------------------------------------------

def test_everybody_gets_the_same_welcome():
    table = welcomed()
    welcomes = [table.got(sender, m.Welcome) for sender in ALL]
    assert [w[0].index for w in welcomes] == [0, 1, 2]
    assert len({(w[0].epoch, w[0].nodes) for w in welcomes}) == 1
    assert [(n.host, n.ranks) for n in welcomes[0][0].nodes] == [("a", (0, 1)), ("b", (2, 3)), ("h", ())]


def test_a_rejoin_corrects_the_counts():
    table = Table(num_nodes=1, num_server_processes=1)
    table.say(b"A", join("a", 0, server_processes=1), join("a", 2, server_processes=1))
    assert table.got(b"A", m.Welcome)[0].nodes[0].ranks == (0, 1)


@pytest.mark.parametrize(("bad", "words"), [
    (join("b", version=99), "protocol version differs: 99 on host b"),
    (join("b", package="2.0"), "package version differs: 2.0 on host b"),
    (join("b", settings={"transport": "shm"}), "setting transport differs: shm on host b (pid 1), tcp on the scheduler"),
])
def test_a_mismatch_refuses_the_culprit_and_aborts_the_others(bad, words):
    table = Table(package="1.0", fingerprint={"transport": "tcp"})
    table.say(b"A", join("a"))
    table.say(b"B", bad)
    (refuse,) = table.inbox[b"B"]
    assert isinstance(refuse, m.Refuse) and refuse.error == "MismatchError" and words in refuse.reason
    assert table.inbox[b"A"] == [m.Abort(error="MismatchError", reason=refuse.reason)] == [table.job.aborted]
    table.say(b"C", join("c"))
    assert table.inbox[b"C"] == [table.job.aborted]


def test_one_node_too_many_aborts_before_and_is_refused_after_the_welcome():
    table = Table()
    table.say(b"A", join("a", index=0))
    table.say(b"B", join("b", index=0))
    assert "node_index 0" in table.job.aborted.reason and table.job.aborted.error == "ConfigError"
    table = welcomed()
    table.say(b"Z", join("z"))
    (refuse,) = table.inbox[b"Z"]
    assert isinstance(refuse, m.Refuse) and "already complete with 3 nodes; the node on host z" in refuse.reason
    assert not table.job.over


def test_ranks_that_do_not_fit_abort():
    table = Table(size=5)
    table.say(b"A", join("a", 2))
    table.say(b"B", join("b", 2))
    assert all(table.inbox[sender] == [table.job.aborted] for sender in (b"A", b"B"))
    assert table.job.aborted.reason.startswith("size is 5, but 4 ranks are there")


@pytest.mark.parametrize(("fields", "words"), [
    ({"placement": "ps", "num_nodes": 1}, "placement ps puts all sums on helper nodes, but the job has none"),
    ({"placement": "hash:mixed", "num_nodes": 1, "num_helpers": 0}, None),
])
def test_a_placement_that_cannot_place_aborts_at_the_start(fields, words):
    table = Table(**fields)
    table.say(b"A", join("a"))
    assert (table.job.aborted.reason.startswith(words) if words else table.got(b"A", m.Welcome))


@pytest.mark.parametrize("fields", [{"num_nodes": 0}, {"placement": "best"}])
def test_settings_are_checked(fields):
    with pytest.raises(ConfigError):
        Job(JobSettings(**{"num_nodes": 1, **fields}), 0.0)


def test_the_start_deadline_names_who_is_missing():
    table = Table(num_helpers=1)
    table.say(b"A", join("a", 2))
    table.say(b"H", join("h", 0))
    for now in range(2, 60, 2):
        table.tick(now)
        table.say(b"A", m.Heartbeat(sequence=now))
        table.say(b"H", m.Heartbeat(sequence=now))
    assert not table.job.over
    table.tick(60.0)
    assert table.job.aborted.error == "StallError"
    assert "start_timeout_s = 60 s: have node 0 (a, 2 ranks), helper 0 (h); missing node 1 (never joined)" in (
        table.job.aborted.reason)
    assert table.got(b"A", m.Abort) == table.got(b"H", m.Abort) == [table.job.aborted]


def test_strangers_are_not_heard():
    table = Table()
    table.say(b"Z", m.Heartbeat(sequence=1), m.Lost(who="rank 0", reason="x"), m.Ready(generation=1))
    assert not table.inbox and not table.job.over


# -- declaring --------------------------------------------------------------------------------------------

def test_a_plan_is_committed_when_everybody_is_ready():
    table = welcomed()
    for rank, sender in ((3, b"B"), (0, b"A"), (2, b"B")):
        table.say(sender, m.Declare(rank=rank, tensors=(spec("a"), spec("b", shape=(3_000_000,)))))
    assert not table.got(b"A", m.Plan)
    table.say(b"A", m.Declare(rank=1, tensors=(spec("b", shape=(3_000_000,)), spec("a"))))
    plans = [table.got(sender, m.Plan) for sender in ALL]
    assert plans[0] == plans[1] == plans[2] and plans[0][0].generation == 1
    a, b = plans[0][0].units
    assert (a.name, a.priority, b.name, b.priority) == ("a", 0, "b", -1)
    assert len(b.parts) == 3 and {part.owner for part in (*a.parts, *b.parts)} == {0, 1, 2}
    table.say(b"A", m.Ready(generation=1))
    table.say(b"A", m.Ready(generation=1))
    table.say(b"H", m.Ready(generation=1))
    assert not table.got(b"A", m.Commit)
    table.say(b"B", m.Ready(generation=1))
    assert [table.got(sender, m.Commit) for sender in ALL] == [[m.Commit(generation=1, order=(0, 1, 2, 3))]] * 3


def test_one_generation_is_in_flight_and_the_rest_is_one_batch():
    table = welcomed()
    for name in ("a", "b", "c"):
        for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
            table.say(sender, *(m.Declare(rank=rank, tensors=(spec(name),)) for rank in ranks))
    assert [unit.name for plan in table.got(b"A", m.Plan) for unit in plan.units] == ["a"]
    for sender in ALL:
        table.say(sender, m.Ready(generation=1))
    (plan,) = table.got(b"A", m.Plan)
    assert [(u.name, u.unit, u.parts[0].part, u.priority) for u in plan.units] == [("b", 1, 1, -1), ("c", 2, 2, -2)]
    assert sorted(part.owner for unit in plan.units for part in unit.parts) == [1, 2]


def test_urgency_is_ranked_over_all_generations():
    table = committed("a", "b")
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=(spec("c", priority=1),)) for rank in ranks))
    for sender in ALL:
        table.say(sender, m.Ready(generation=2))
    assert table.got(b"H", m.Commit) == [m.Commit(generation=2, order=(1, 2, 0))]


def test_a_mismatch_is_told_to_all_that_declared_it_then_and_later():
    table = welcomed()
    table.say(b"B", m.Declare(rank=2, tensors=(spec("a"),)))
    table.say(b"B", m.Declare(rank=3, tensors=(spec("a", dtype="int8"),)))
    (failed,) = table.got(b"B", m.DeclareFailed)
    assert failed.names == ("a",) and failed.error == "MismatchError"
    assert "'a': dtype differs: 'float32' on rank 2, 'int8' on rank 3" in failed.reason
    assert not table.got(b"A", m.DeclareFailed)
    table.say(b"A", m.Declare(rank=0, tensors=(spec("a"),)))
    assert table.got(b"A", m.DeclareFailed) == [failed]
    assert not table.job.over


def test_a_node_that_cannot_prepare_rolls_everybody_back():
    table = welcomed()
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=(spec("a"), spec("b"))) for rank in ranks))
        table.say(sender, *(m.Declare(rank=rank, tensors=(spec("c"),)) for rank in ranks))
    table.say(b"A", m.Ready(generation=1))
    table.say(b"H", m.PrepareFailed(generation=1, reason="needs 9 bytes, has 8"))
    table.say(b"B", m.Ready(generation=1), m.PrepareFailed(generation=1, reason="late"))
    for sender in ALL:
        (failed,) = table.got(sender, m.DeclareFailed)
        assert (failed.names, failed.error) == (("a", "b"), "CapacityError")
        assert "helper 0 (node 2, host h) cannot prepare generation 1: needs 9 bytes, has 8" in failed.reason
        assert not table.got(sender, m.Commit)
        (first, second) = table.got(sender, m.Plan)
        assert (second.generation, second.units[0].unit, second.units[0].parts[0].part) == (2, 2, 2)
    for sender in ALL:
        table.say(sender, m.Ready(generation=2))
    assert table.got(b"A", m.Commit) == [m.Commit(generation=2, order=(1, 2, 0))]


def test_too_many_partitions_fail_in_numbers():
    table = welcomed(partition_nbytes=4096)
    big = spec("a", shape=(65537 * 1024,))
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=(big,)) for rank in ranks))
    (failed,) = table.got(b"H", m.DeclareFailed)
    assert failed.error == "CapacityError" and "65537 partitions" in failed.reason


# -- barriers and leaving ---------------------------------------------------------------------------------

def test_a_barrier_opens_when_all_have_entered():
    table = welcomed()
    table.say(b"A", m.BarrierEnter(rank=0, sequence=1), m.BarrierEnter(rank=1, sequence=1),
              m.BarrierEnter(rank=1, sequence=1))
    table.say(b"B", m.BarrierEnter(rank=2, sequence=1))
    assert not table.got(b"A", m.BarrierDone)
    table.say(b"B", m.BarrierEnter(rank=3, sequence=1))
    assert all(table.got(sender, m.BarrierDone) == [m.BarrierDone(sequence=1)] for sender in ALL)
    table.say(b"B", m.BarrierEnter(rank=3, sequence=1))
    assert not table.got(b"B", m.BarrierDone)


def test_finish_when_all_ranks_have_left():
    table = welcomed()
    table.say(b"A", m.RankLeft(rank=0), m.RankLeft(rank=1), m.RankLeft(rank=1))
    table.say(b"B", m.RankLeft(rank=2))
    assert not table.job.over
    table.say(b"B", m.RankLeft(rank=3))
    assert table.job.finished and all(table.got(sender, m.Finish) == [m.Finish()] for sender in ALL)
    table.say(b"A", m.Lost(who="rank 2", reason="exited"))
    table.post(table.job.unreachable(1.0, b"A"))
    table.tick(1000.0)
    assert table.job.aborted is None and table.job.finished


# -- trouble ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("who", "words"), [
    ("rank 3", "rank 3 (node 1, host b) is lost: killed (seen by node 0 (host a, ranks 0, 1))"),
    ("node 1", "node 1 (host b, ranks 2, 3) is lost: killed"),
    ("node 2", "helper 0 (node 2, host h) is lost"),
    ("rank 77", "rank 77 is lost"), ("a server", "a server is lost"),
])
def test_a_loss_is_told_to_everybody(who, words):
    table = welcomed()
    table.say(b"A", m.Lost(who=who, reason="killed"))
    assert table.job.aborted.error == "PeerLostError" and words in table.job.aborted.reason
    assert all(table.got(sender, m.Abort) == [table.job.aborted] for sender in ALL)
    table.say(b"B", m.Lost(who="rank 0", reason="x"), m.Ready(generation=1), m.BarrierEnter(rank=2, sequence=1))
    assert not table.got(b"B", m.Abort)


def test_a_loss_before_the_welcome_counts():
    table = Table()
    table.say(b"A", join("a"), m.Lost(who="local rank 1", reason="exited with 1"))
    assert "local rank 1 is lost: exited with 1 (seen by the node on host a (pid 1, 1 ranks))" in table.job.aborted.reason


def test_a_silent_node_is_lost_after_its_lease():
    table = welcomed()
    for now in range(1, 10):
        table.tick(float(now))
        table.say(b"A", m.Heartbeat(sequence=now))
        table.say(b"H", m.Heartbeat(sequence=now))
    assert not table.job.over
    table.tick(10.0)
    assert table.job.aborted.error == "PeerLostError"
    assert table.job.aborted.reason == (
        "node 1 (host b, ranks 2, 3) has been silent for 10.0 s (lease_s = 10)")


def test_a_scheduler_that_slept_blames_nobody():
    table = welcomed()
    table.tick(1000.0)
    assert not table.job.over
    for now in range(1001, 1012):
        table.tick(float(now))
    assert table.job.aborted.error == "PeerLostError"


def test_heartbeats_go_to_everybody():
    table = welcomed()
    for now in (0.5, 1.0, 1.5, 2.5):
        table.tick(now)
    assert table.got(b"H", m.Heartbeat) == [m.Heartbeat(sequence=1), m.Heartbeat(sequence=2)]


def test_an_unreachable_node_is_lost():
    table = welcomed()
    table.post(table.job.unreachable(1.0, b"Z"))
    assert not table.job.over
    table.post(table.job.unreachable(1.0, b"B"))
    assert "node 1 (host b, ranks 2, 3) closed its connection" in table.job.aborted.reason


@pytest.mark.parametrize(("message", "words"), [
    (m.Declare(rank=2, tensors=()), "node 0 (host a, ranks 0, 1) sent Declare for rank 2, which is not its own"),
    (m.BarrierEnter(rank=9, sequence=1), "sent BarrierEnter for rank 9"),
    (join("a", 2), "joined twice"),
])
def test_nonsense_from_a_node_ends_the_job(message, words):
    table = welcomed()
    table.say(b"A", message)
    assert table.job.aborted.error == "ProtocolError" and words in table.job.aborted.reason


def test_nothing_but_joins_before_the_welcome():
    table = Table()
    table.say(b"A", join("a"), m.Ready(generation=1))
    assert "sent Ready before all had joined" in table.job.aborted.reason


# -- who is missing? --------------------------------------------------------------------------------------

def stalled(rank=0, part=0, name="a"):
    return m.Stalled(rank=rank, part=part, round=5 if part >= 0 else -1, name=name)


def report(ranks=(), nodes=(), part=0):
    return m.StallReport(part=part, round=5, missing_ranks=ranks, missing_nodes=nodes)


def test_reports_become_words():
    table = committed("a")
    table.say(b"B", m.RankLeft(rank=2))
    table.say(b"A", stalled(rank=0), stalled(rank=1))
    assert all(table.got(sender, m.StallAsk) == [m.StallAsk(part=0, round=5)] for sender in ALL)
    table.say(b"A", report(nodes=(1,)))
    table.say(b"H", report(nodes=(1,)))
    assert not table.got(b"A", m.StallAnswer)
    table.say(b"B", report(ranks=(3, 2)))
    answers = table.got(b"A", m.StallAnswer)
    assert [(answer.rank, answer.part, answer.round) for answer in answers] == [(0, 0, 5), (1, 0, 5)]
    assert {answer.missing for answer in answers} == {
        "missing: rank 2 (node 1, host b): has called shutdown; rank 3 (node 1, host b): has not pushed"}


def test_who_does_not_report_is_named():
    table = committed("a")
    table.say(b"A", stalled())
    table.say(b"A", report(nodes=(2,)))
    table.say(b"B", report())
    table.tick(1.4)
    assert not table.got(b"A", m.StallAnswer)
    table.tick(1.5)
    (answer,) = table.got(b"A", m.StallAnswer)
    assert answer.missing == "missing: helper 0 (node 2, host h): does not answer"
    table.say(b"H", report())
    assert not table.got(b"A", m.StallAnswer)


@pytest.mark.parametrize(("reports", "words"), [
    ({b"A": ((), (1,)), b"B": ((), ()), b"H": ((), ())},
     "missing: node 1 (host b, ranks 2, 3): its data has not arrived"),
    ({b"A": ((), ()), b"B": ((), ()), b"H": ((), ())}, "nobody is missing: all have pushed"),
])
def test_words_without_missing_ranks(reports, words):
    table = committed("a")
    table.say(b"A", stalled())
    for sender, (ranks, nodes) in reports.items():
        table.say(sender, report(ranks, nodes))
    assert table.got(b"A", m.StallAnswer)[0].missing == words


def test_who_has_not_declared():
    table = welcomed()
    table.say(b"A", m.Declare(rank=0, tensors=(spec("a"),)), stalled(part=-1))
    (answer,) = table.got(b"A", m.StallAnswer)
    assert (answer.rank, answer.part, answer.round) == (0, -1, -1)
    assert answer.missing.startswith("missing: rank 1 (node 0, host a): has not declared 'a'; rank 2 (node 1, host b)")
    assert not table.got(b"B", m.StallAsk)


def test_who_is_still_preparing():
    table = welcomed()
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=(spec("a"),)) for rank in ranks))
    for sender in (b"A", b"H"):
        table.say(sender, m.Ready(generation=1))
    table.say(b"A", stalled(part=-1))
    assert table.got(b"A", m.StallAnswer)[0].missing == (
        "missing: node 1 (host b, ranks 2, 3): is still preparing memory for 'a'")
    table.say(b"B", m.Ready(generation=1))
    table.say(b"A", stalled(part=-1))
    assert table.got(b"A", m.StallAnswer)[0].missing == "nobody is missing: all ranks have declared 'a'"


def test_a_failed_declaration_is_the_answer():
    table = welcomed()
    table.say(b"A", m.Declare(rank=0, tensors=(spec("a", dtype="uint16"),)), stalled(part=-1))
    assert "the declaration failed: tensor 'a' has dtype 'uint16'" in table.got(b"A", m.StallAnswer)[0].missing


def test_who_has_not_entered_the_barrier():
    table = welcomed()
    table.say(b"A", m.BarrierEnter(rank=0, sequence=3), m.BarrierEnter(rank=1, sequence=3))
    table.say(b"B", m.RankLeft(rank=2))
    table.say(b"A", stalled(part=-1, name="barrier:3"))
    assert table.got(b"A", m.StallAnswer)[0].missing == (
        "missing: rank 2 (node 1, host b): has called shutdown; rank 3 (node 1, host b): has not entered the barrier")


# -- a random walk ----------------------------------------------------------------------------------------

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

    @initialize(order=st.permutations(sorted(HOSTS)), n_late=st.integers(0, 2))
    def start(self, order, n_late):
        self.order = list(order)
        while len(self.order) > n_late:
            self.join()

    def post(self, outgoing):
        for destination, message in outgoing:
            if isinstance(message, m.Commit):
                assert self.ready[message.generation] == set(HOSTS), "committed without all being ready"
                assert message.generation not in self.failed
            if isinstance(message, m.BarrierDone):
                ranks = [rank for owned in self.ranks.values() for rank in owned]
                assert all(self.entered[rank] >= message.sequence for rank in ranks)
            self.log[destination].append(message)

    def say(self, sender, message):
        over = self.job.over
        outgoing = self.job.receive(self.now, sender, message)
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
        elif isinstance(message, m.StallAsk):
            self.say(sender, m.StallReport(part=message.part, round=message.round, missing_ranks=(), missing_nodes=()))

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
            self.say(sender, m.Stalled(rank=rank, part=part, round=1, name="w"))

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

    @invariant()
    def everybody_is_told_the_same(self):
        joined = [sender for sender in HOSTS if sender not in self.order]
        for kinds in ((m.Plan, m.Commit), (m.BarrierDone,), (m.Abort,), (m.Finish,)):
            told = {tuple(message for message in self.log[sender] if isinstance(message, kinds)) for sender in joined}
            assert len(told) <= 1
        assert len({message.nodes for log in self.log.values() for message in log if isinstance(message, m.Welcome)}) <= 1

    @invariant()
    def one_generation_is_in_flight(self):
        in_flight = 0
        for message in self.log[b"A"]:
            if isinstance(message, m.Plan):
                in_flight += 1
            elif isinstance(message, m.Commit) or (isinstance(message, m.DeclareFailed) and message.error == "CapacityError"
                                                   and in_flight):
                in_flight -= 1
            assert in_flight <= 1

    @invariant()
    def the_end_is_the_end(self):
        if self.job.aborted is not None:
            joined = [sender for sender in HOSTS if sender not in self.order]
            assert all(self.log[sender].count(self.job.aborted) == 1 for sender in joined if self.log[sender])
        if self.job.finished:
            assert len(self.left) == 6 and all(self.log[sender][-1] == m.Finish() for sender in HOSTS)

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


Walk.TestCase.settings = settings(max_examples=60, stateful_step_count=120, deadline=None)
TestWalk = Walk.TestCase
