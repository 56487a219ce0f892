"""A node without a scheduler: what it tells the next one, when that is over, and how a job ends that has none."""
from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import pytest

from bpsfast.base.settings import Settings
from bpsfast.node import recovery
from bpsfast.node.recovery import SchedulerFailover
from bpsfast.orchestration import messages as m
from bpsfast.orchestration.failover.control_log import ControlLog
from tests.support.job_table import spec, welcomed
from tests.support.two_nodes import End, connect

LIMIT_S = 20.0
DECLARED = m.Declare(rank=0, tensors=(spec("a"),))


@dataclass
class Node:
    """The control loop, as far as it is used: what was said to a scheduler, and whether the peers are connected."""

    said: list[m.Message] = field(default_factory=list)
    runtime: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(connected=True))

    def send_unrecorded(self, message):
        self.said.append(message)

    def told(self):
        """What was said since the last call."""
        said, self.said = self.said, []
        return said


@dataclass
class Plans:
    """What is prepared: it is dropped so often."""

    n_resumed: int = 0

    def resumed(self):
        self.n_resumed += 1


@dataclass
class Peers:
    """The data ports of others, whose peer_shutdowns are the test's."""

    peer_shutdowns: set[int] = field(default_factory=set)
    has_announced_shutdown: bool = False
    n_taken: int = 0

    def announce_shutdown(self):
        self.n_taken += 1


class Ports:
    """Real data ports, as the node's peers show them."""

    def __init__(self, peering):
        self._peer_shutdowns = peering.peer_shutdowns
        self.announce_shutdown = peering.peer_shutdowns.announce_shutdown

    @property
    def peer_shutdowns(self):
        return self._peer_shutdowns.announced

    @property
    def has_announced_shutdown(self):
        return self._peer_shutdowns.are_announced


class Alone:
    """A node of two that have two ranks each (A and B), or their helper (H), with its own control log."""

    def __init__(self, sender, peers=None, welcome=None):
        found = welcome
        if found is None:
            (found,) = welcomed().got(sender, m.Welcome)
        self.welcome = found
        self.control_log = ControlLog("1.0", {"transport": "tcp"})
        self.node, self.plans, self.peers = Node(), Plans(), peers if peers is not None else Peers()
        self.scheduler_failover = SchedulerFailover(self.node, self.control_log, self.peers, self.plans, 60.0)

    def welcomed(self):
        """Let it be admitted."""
        self.control_log.heard(self.welcome)
        self.scheduler_failover.welcomed(self.welcome)
        return self

    def leaves(self):
        """Let all its ranks leave."""
        for rank in self.welcome.nodes[self.welcome.index].ranks:
            self.control_log.said(m.RankLeft(rank=rank))


@pytest.fixture
def at_once(monkeypatch):
    """Whoever could tell a scheduler that all is over waits for none."""
    monkeypatch.setattr(recovery, "_LAST_WAIT_S", 0.0)


@pytest.fixture
def clock(monkeypatch):
    """The time, which is `now` until the test says otherwise."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(recovery, "time", clock)
    return clock


def node(sender=b"A", **options):
    return Alone(sender, **options).welcomed()


# -- what the next scheduler is told -----------------------------------------------------------------------------------

def test_all_is_told_over_each_connection_that_is_made(caplog):
    caplog.set_level(logging.INFO, "bpsfast.node")
    alone = node()
    alone.control_log.said(DECLARED)
    assert not alone.scheduler_failover.lasts and alone.node.told() == []
    for _ in range(2):
        alone.scheduler_failover.begin("127.0.0.1:7")
        first, *rest, last = alone.node.told()
        assert isinstance(first, m.Rejoin) and (first.index, first.recall, first.n_declared) == (0, 0, 1)
        assert rest == [msgspec.structs.replace(DECLARED, positions=(0,))] and last == m.RejoinComplete()
        assert alone.scheduler_failover.lasts
    assert caplog.messages == ["the scheduler at 127.0.0.1:7 is lost: the job goes on without it, and waits up to 60 s "
                               "(start_timeout_s) for another one there"], "that is said once"


@pytest.mark.parametrize(("sender", "level"), [(b"A", "WARNING"), (b"B", "INFO"), (b"H", "INFO")])
def test_one_node_warns_for_all(caplog, clock, sender, level):
    caplog.set_level(logging.INFO, "bpsfast.node")
    alone = node(sender)
    alone.scheduler_failover.begin("127.0.0.1:7")
    alone.scheduler_failover.resumed(m.Resume())
    assert [record.levelname for record in caplog.records] == [level] * 2
    assert caplog.messages[1] == "the job has a scheduler again, after 0.0 s"


def test_a_recall_is_answered_with_its_number_and_lasts_until_all_is_known(caplog):
    alone = node()
    alone.scheduler_failover.recalled(m.RejoinRequest(number=5))
    first, *_, last = alone.node.told()
    assert (first.recall, last) == (5, m.RejoinComplete()) and alone.scheduler_failover.lasts
    alone.scheduler_failover.recalled(m.RejoinRequest(number=6))
    assert alone.node.told()[0].recall == 6
    alone.scheduler_failover.resumed(m.Resume())
    assert not alone.scheduler_failover.lasts and alone.plans.n_resumed == 1
    assert "is lost" not in caplog.text, "that one has asked only"


def test_a_recall_during_a_loss_does_not_begin_it_anew(caplog, clock):
    alone = node()
    alone.scheduler_failover.begin("127.0.0.1:7")
    clock.now = 130.0
    alone.scheduler_failover.recalled(m.RejoinRequest(number=1))
    alone.scheduler_failover.begin("127.0.0.1:7")
    clock.now = 142.5
    alone.scheduler_failover.resumed(m.Resume())
    assert caplog.messages[-1] == "the job has a scheduler again, after 42.5 s"
    alone.scheduler_failover.begin("127.0.0.1:7")
    clock.now = 143.0
    alone.scheduler_failover.resumed(m.Resume())
    assert caplog.messages[-1] == "the job has a scheduler again, after 0.5 s", "each time is a time of its own"


def test_who_was_not_welcomed_has_nothing_to_tell():
    alone = Alone(b"A")
    alone.scheduler_failover.recalled(m.RejoinRequest(number=1))
    assert alone.node.told() == [] and not alone.scheduler_failover.is_over()
    alone.welcomed()
    assert not alone.scheduler_failover.lasts, "a scheduler is there"


def test_resume_without_a_loss_drops_what_was_prepared_and_says_nothing(caplog):
    caplog.set_level(logging.INFO, "bpsfast.node")
    alone = node()
    for n in (1, 2):
        alone.scheduler_failover.resumed(m.Resume())
        assert alone.plans.n_resumed == n and not alone.scheduler_failover.lasts
    assert alone.node.told() == [] and not caplog.messages


# -- the end -----------------------------------------------------------------------------------------------------------

def test_where_there_is_a_scheduler_it_says_the_end(at_once):
    alone = node()
    alone.leaves()
    alone.peers.peer_shutdowns, alone.peers.has_announced_shutdown = {1}, True
    assert not alone.scheduler_failover.is_over()
    alone.scheduler_failover.begin("127.0.0.1:7")
    assert alone.scheduler_failover.is_over() and alone.peers.n_taken == 1
    alone.scheduler_failover.resumed(m.Resume())
    assert not alone.scheduler_failover.is_over()


def test_leave_is_taken_once_and_when_the_last_rank_here_has_left(at_once):
    alone = node()
    alone.scheduler_failover.begin("127.0.0.1:7")
    alone.peers.peer_shutdowns = {1}
    alone.control_log.said(m.RankLeft(rank=0))
    assert not alone.scheduler_failover.is_over() and alone.peers.n_taken == 0, "rank 1 trains on"
    alone.control_log.said(m.RankLeft(rank=1))
    assert not alone.scheduler_failover.is_over() and not alone.scheduler_failover.is_over()
    assert alone.peers.n_taken == 1
    alone.peers.has_announced_shutdown = True
    assert alone.scheduler_failover.is_over()


def test_nobody_leaves_before_the_peers_are_connected(at_once):
    alone = node()
    alone.scheduler_failover.begin("127.0.0.1:7")
    alone.leaves()
    alone.peers.peer_shutdowns, alone.peers.has_announced_shutdown = {1}, True
    alone.node.runtime.connected = False
    assert not alone.scheduler_failover.is_over() and alone.peers.n_taken == 0


def test_all_nodes_with_ranks_must_have_left_and_the_next_scheduler_hears_who_has(at_once):
    alone = node()
    alone.leaves()
    alone.peers.has_announced_shutdown = True
    alone.scheduler_failover.begin("127.0.0.1:7")
    helper = next(each.index for each in alone.welcome.nodes if not each.ranks)
    alone.peers.peer_shutdowns = {helper}
    assert not alone.scheduler_failover.is_over()
    alone.peers.peer_shutdowns = {1}
    assert alone.scheduler_failover.is_over(), "a helper has no ranks that could leave"
    alone.node.told()
    alone.scheduler_failover.begin("127.0.0.1:7")
    assert alone.node.told()[0].nodes_left == tuple(sorted({1, helper}))


def test_a_helper_ends_when_all_others_have_left_and_takes_no_leave(at_once):
    alone = node(b"H")
    alone.scheduler_failover.begin("127.0.0.1:7")
    alone.peers.peer_shutdowns = {0}
    assert not alone.scheduler_failover.is_over()
    alone.peers.peer_shutdowns = {0, 1}
    assert alone.scheduler_failover.is_over() and alone.peers.n_taken == 0


def test_a_scheduler_that_comes_back_soon_finds_somebody(clock):
    alone = node()
    alone.leaves()
    alone.peers.peer_shutdowns, alone.peers.has_announced_shutdown = {1}, True
    alone.scheduler_failover.begin("127.0.0.1:7")
    clock.now += recovery._LAST_WAIT_S - 0.1
    assert not alone.scheduler_failover.is_over()
    clock.now += 0.2
    assert alone.scheduler_failover.is_over()


def test_two_nodes_tell_each_other_over_their_data_ports(at_once, no_leaks):
    ends = [End(index, Settings(transport="tcp", start_timeout_s=LIMIT_S, engine_threads=1, huge_pages="off"))
            for index in (0, 1)]
    try:
        connect(ends)
        nodes = [node(peers=Ports(end.peering), welcome=m.Welcome(index=end.index, epoch=1, nodes=tuple(end.nodes)))
                 for end in ends]
        for each in nodes:
            each.scheduler_failover.begin("127.0.0.1:7")
        nodes[1].leaves()
        deadline = time.monotonic() + LIMIT_S
        while not ends[0].peering.peer_shutdowns.announced:
            assert not nodes[0].scheduler_failover.is_over() and not nodes[1].scheduler_failover.is_over()
            assert time.monotonic() < deadline
        assert not nodes[1].scheduler_failover.is_over(), "rank 0 trains on"
        nodes[0].leaves()
        waiting = set(nodes)
        while waiting:
            waiting -= {each for each in waiting if each.scheduler_failover.is_over()}
            assert time.monotonic() < deadline
    finally:
        for end in ends:
            end.close()
