"""The mailbox over a real socket pair: replies, several waiting threads, a node that goes away."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from bpsfast.base.message_socket import MessageSocket
from bpsfast.orchestration.errors import ClosedError, PeerLostError
from bpsfast.orchestration.messages import Counters, CountersRequest
from bpsfast.trainer.node_connection import Mailbox


@pytest.fixture
def node():
    """Return a process to play the node, and its pidfd."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    yield process, pidfd
    process.kill()
    process.wait(10)
    process.stdin.close()
    os.close(pidfd)


@pytest.fixture
def ends(node):
    """Return (mailbox, the node's channel, what was delivered)."""
    ours, theirs = socket.socketpair()
    told: dict[int, dict[str, int]] = {}
    mailbox = Mailbox(MessageSocket(ours), node[1],
                      lambda message, fds: told.update({message.request: message.counters}),
                      lambda: None, lambda: PeerLostError("the node is lost"))
    with MessageSocket(theirs) as channel:
        yield mailbox, channel, told
    mailbox.close()


def test_a_reply(ends):
    mailbox, channel, told = ends
    mailbox.send(CountersRequest(request=7))
    assert channel.recv(5.0)[0] == CountersRequest(request=7)
    channel.send(Counters(request=7, counters={"a": 1}))
    assert mailbox.wait(lambda: told.pop(7, None), 5.0) == {"a": 1}


def test_no_reply_is_none(ends):
    mailbox, _, told = ends
    assert mailbox.wait(lambda: told.get(1), 0.05) is None


def test_every_thread_gets_its_own_reply(ends):
    mailbox, channel, told = ends
    found: dict[int, dict[str, int] | None] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: mailbox.wait(lambda: told.pop(n, None), 10.0)}))
               for n in range(8)]
    for thread in threads:
        thread.start()
    for number in reversed(range(8)):
        channel.send(Counters(request=number, counters={"n": number}))
    for thread in threads:
        thread.join(15)
    assert found == {n: {"n": n} for n in range(8)}


def test_pump_delivers_without_waiting(ends):
    mailbox, channel, told = ends
    mailbox.pump()
    channel.send(Counters(request=1, counters={}))
    mailbox.pump()
    assert told == {1: {}}


def test_a_closed_socket(ends):
    mailbox, channel, told = ends
    channel.close()
    with pytest.raises(PeerLostError, match="the node is lost"):
        mailbox.wait(lambda: told.get(1), 10.0)
    with pytest.raises(PeerLostError, match="the node is lost"):
        mailbox.send(CountersRequest(request=1))


def test_a_dead_node_is_noticed_though_the_socket_is_open(ends, node):
    mailbox, _, told = ends
    node[0].kill()
    with pytest.raises(PeerLostError, match="the node is lost"):
        mailbox.wait(lambda: told.get(1), 10.0)


def test_check_comes_first(node):
    def over():
        raise ClosedError("over")

    ours, theirs = socket.socketpair()
    mailbox = Mailbox(MessageSocket(ours), node[1], lambda message, fds: None, over, None)
    with theirs, pytest.raises(ClosedError):
        mailbox.wait(lambda: None, 10.0)
    mailbox.close()


def test_what_was_said_before_the_end_counts_first(node):
    def aborted():
        raise PeerLostError("a consequence")

    ours, theirs = socket.socketpair()
    told = {}
    mailbox = Mailbox(MessageSocket(ours), node[1],
                      lambda message, fds: told.update({message.request: "the cause"}), aborted,
                      None)
    with MessageSocket(theirs) as channel:
        channel.send(Counters(request=1, counters={}))
        assert mailbox.wait(lambda: told.get(1), 10.0) == "the cause"
        with pytest.raises(PeerLostError, match="a consequence"):
            mailbox.wait(lambda: told.get(2), 10.0)
    mailbox.close()


def test_what_the_job_was_aborted_with_comes_before_a_node_that_has_left(node):
    ours, theirs = socket.socketpair()

    def check():
        raise PeerLostError("rank 2 died")

    mailbox = Mailbox(MessageSocket(ours), node[1], lambda message, fds: None, check, lambda: PeerLostError("lost"))
    theirs.close()
    with pytest.raises(PeerLostError, match="rank 2 died"):
        mailbox.send(CountersRequest(request=1))
    mailbox.close()
