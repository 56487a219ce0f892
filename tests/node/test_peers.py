"""The other nodes as one node sees them: who is blamed for rubbish, and how long it waits for the scheduler's word."""
from __future__ import annotations

import errno
import socket
import time
from types import SimpleNamespace

import pytest

from bpsfast.base import settings
from bpsfast.base.message_socket import MessageSocket
from bpsfast.node.event_loop import EventLoop
from bpsfast.node.peers import Peers
from bpsfast.node.transport import Epochs
from bpsfast.node.transport.rdma import RdmaLink, rdma_messages
from bpsfast.orchestration.errors import CapacityError, PeerLostError
from bpsfast.orchestration.messages import NewcomerGone, NodeInfo, Welcome

#: Source ids, and what is behind them.
HELPER, RANK = 3, 4


class Control:
    """What a node's control loop is to its peers; `ends`: how `fail` was called; `word`: what is there to be read."""

    name = "node 0"
    ending = is_without_scheduler = False

    def __init__(self) -> None:
        self.runtime = SimpleNamespace(
            connected=True, links={}, why_lost=lambda index, code: errno.errorcode[code],
            who=lambda source: {HELPER: ("node 1", 1), RANK: ("rank 0", None)}[source])
        self.ends = []
        self.told = []
        self.word = lambda: None
        self.send = self.told.append

    def fail(self, error, who="", tell=True):
        self.ends.append((type(error).__name__, str(error), who, tell))

    def run_with_heartbeats(self, work):
        return work()

    def catch_up(self):
        self.word()


class Side:
    """The peers of node 0, which has ranks or not; node 1 is a helper."""

    def __init__(self, n_ranks: int, lease_s: float) -> None:
        self.control = Control()
        self.loop = EventLoop(self._raised)
        values = settings.load({"lease_s": lease_s, "heartbeat_s": lease_s / 4}, {})
        self.peers = Peers(self.control, self.loop, values, b"", None, None,
                           SimpleNamespace(ranks=[object()] * n_ranks), Epochs(1))
        nodes = [NodeInfo(index=index, host="here", pid=1, address="", shm_name="", ranks=ranks, nic_rate_bytes=0.0)
                 for index, ranks in enumerate((tuple(range(n_ranks)), ()))]
        self.peers._welcome = Welcome(index=0, epoch=1, nodes=tuple(nodes))
        self.peers._nodes = {node.index: node for node in nodes}

    def lose(self) -> None:
        self.peers._lost(1, "its process is gone")

    def until_it_ends(self) -> float:
        """Return when it ended, or when nothing more is to come."""
        while self.loop._timers and not self.control.ends:
            self.loop.run_once(10.0)
        return time.monotonic()

    @staticmethod
    def _raised(exc: Exception) -> None:
        raise exc


@pytest.fixture
def side():
    made = []

    def make(n_ranks=1, lease_s=0.05):
        made.append(Side(n_ranks, lease_s))
        return made[-1]

    yield make
    for each in made:
        each.loop.close()


@pytest.fixture
def grace(monkeypatch):
    monkeypatch.setattr("bpsfast.node.peers.GRACE_S", 0.05)


def test_rubbish_ends_the_job_by_the_word_of_who_got_it_and_names_who_sent_it(side):
    here = side()
    here.peers._source_lost(HELPER, errno.EPROTO)
    ((kind, text, who, tell),) = here.control.ends
    assert (kind, who, tell) == ("ProtocolError", "", True), "as a lost helper the job would go on without it"
    assert text.startswith("node 1 announced or sent what fits no partition (EPROTO)")


def test_rubbish_of_a_rank_is_that_ranks(side):
    here = side()
    here.peers._source_lost(RANK, errno.EPROTO)
    ((_, text, who, _),) = here.control.ends
    assert who == "rank 0" and text.startswith("rank 0 announced")


@pytest.mark.parametrize("code", [errno.EPROTO, errno.ECONNRESET])
def test_who_was_parted_with_ends_nothing_more(side, code):
    here = side()
    here.peers.drop_peer(1)
    here.peers._source_lost(HELPER, code)
    assert not here.control.ends and not here.control.told


@pytest.mark.parametrize("lease_s", [0.05, 0.4])
def test_the_scheduler_has_the_lease_to_say_what_a_loss_means(side, grace, lease_s):
    here = side(lease_s=lease_s)
    begin = time.monotonic()
    here.lose()
    assert here.control.told[0].who == "node 1" and here.until_it_ends() - begin >= lease_s
    ((kind, text, _, tell),) = here.control.ends
    assert (kind, tell) == (PeerLostError.__name__, False) and "node 1 (here) is lost: its process is gone" in text


def test_a_helper_that_hears_no_word_ends_alone_and_says_so(side, grace):
    here = side(n_ranks=0)
    here.lose()
    here.until_it_ends()
    assert [(who, tell) for _, _, who, tell in here.control.ends] == [("", True)]


def test_a_word_that_is_there_but_was_not_read_counts(side, grace):
    here = side()
    here.lose()
    here.control.word = lambda: here.peers.drop_peer(1)  # as Freeze does
    here.until_it_ends()
    assert not here.control.ends


@pytest.mark.parametrize("says_so", [True, False])
def test_the_next_scheduler_has_the_lease_to_say_what_a_loss_means(side, grace, says_so):
    here = side(lease_s=0.4)
    here.control.is_without_scheduler = True
    words = iter(range(100))
    back = []

    def word():
        if next(words) == 3:
            here.control.is_without_scheduler = False
            back.append(time.monotonic())
            if says_so:
                here.loop.call_at(back[0] + 0.2, lambda: here.peers.drop_peer(1))

    here.control.word = word
    here.lose()
    ended = here.until_it_ends()
    assert bool(here.control.ends) != says_so and (says_so or ended - back[0] >= 0.4)


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_who_was_to_come_and_does_not_ends_nothing(side, grace, is_lost_first):
    here = side()
    given_up = []
    here.peers._peering = SimpleNamespace(
        peer_shutdowns=SimpleNamespace(announced=set()), forget=lambda index: None,
        reconnector=SimpleNamespace(give_up=lambda *call: given_up.append(call)))
    if is_lost_first:
        here.lose()
    here.peers.not_coming(NewcomerGone(node=1))
    here.lose()
    here.until_it_ends()
    assert not here.control.ends and [index for index, _ in given_up] == [1]
    assert len(here.control.told) == is_lost_first, "the scheduler knows already"


@pytest.mark.parametrize("error", [CapacityError("no memory for RDMA"), LookupError("not registered"), OSError(9, "?")])
def test_a_newcomer_that_cannot_be_taken_in_is_lost_and_nothing_else_is(side, grace, error):
    here, link = side(), SimpleNamespace(index=1)
    here.peers._peering = SimpleNamespace(
        peer_shutdowns=SimpleNamespace(announced=set()), take=lambda index: {index: link},
        describe=lambda: {"node 1": "rdma: why not"})

    def add_link(link, transport):
        raise error

    here.control.runtime.add_link = add_link
    here.peers.add_peer(1)
    ((who, reason),) = [(told.who, told.reason) for told in here.control.told]
    assert who == "node 1" and str(error.args[-1]) in reason and "(rdma: why not)" in reason
    assert not here.control.ends
    here.peers.drop_peer(1)  # as the next Freeze has it
    here.until_it_ends()
    assert not here.control.ends


def test_what_came_with_the_last_message_of_a_handshake_is_read(no_leaks, side):
    """The handshake has taken both messages from the socket, so the descriptor does not become readable again."""
    here = side()
    ours, theirs = socket.socketpair()
    with MessageSocket(ours, rdma_messages.decode) as near, MessageSocket(theirs, rdma_messages.decode) as far:
        far.send(rdma_messages.RdmaProven(pairs=(0,)))
        far.send(rdma_messages.LinkTaken())
        assert near.recv(20)[0] == rdma_messages.RdmaProven(pairs=(0,))
        link, heard = RdmaLink(1, 2, (), near), []
        here.peers._link_changes = SimpleNamespace(message=lambda *said: heard.append(said))
        here.control.count_message = lambda: None
        here.peers._watch_channel(link)
        here.loop.run_once(20)
        assert heard == [(link, rdma_messages.LinkTaken())]
        here.loop.forget(near.fileno())
