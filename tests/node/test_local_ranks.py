"""Local ranks: a rank that ends is reported once, also if it was sent a message between its end and the check."""
from __future__ import annotations

import os
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest

from bpsfast.base.message_socket import MessageSocket
from bpsfast.node.event_loop import EventLoop
from bpsfast.node.local_ranks import LocalRank, LocalRanks
from bpsfast.node.regions import Regions
from bpsfast.orchestration import messages


class Node:
    """What a local_ranks asks its node for; keeps what it was told to fail with."""

    ending = False

    def __init__(self):
        self.failures = []

    def fail(self, error, *who):
        self.failures.append(error)

    def send(self, message):
        pass

    def first_rank_attached(self):
        pass


@pytest.fixture
def rank():
    """A rank that is a process of its own, with the only other end of its channel."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "100"], pass_fds=[theirs.fileno()])
    theirs.close()
    pidfd = os.pidfd_open(process.pid)
    regions = Regions()
    attach = SimpleNamespace(pid=process.pid, local_rank=0, rank=0)
    made = LocalRank(MessageSocket(ours), attach, pidfd, regions)
    yield made, process
    process.kill()
    process.wait(10)
    made.close()
    regions.close()


@pytest.mark.parametrize("told_in_between", [False, True])
def test_a_rank_that_dies_is_reported(rank, told_in_between):
    rank, process = rank
    node = Node()
    loop = EventLoop(lambda error: pytest.fail(str(error)))
    home = LocalRanks(node, loop, SimpleNamespace(local_size=1, on_worker_loss="abort"), "1.0", {})
    home.ranks, home._attached = [rank], True
    loop.watch(rank.channel.fileno(), lambda: home._read(rank))
    loop.watch(rank.pidfd, lambda: home._died(rank))
    process.kill()
    os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
    if told_in_between:  # the loop was busy: it hears of others before it looks at the pidfd
        home.first_rank_left(messages.FirstRankLeft(rank=3))
        assert rank.dead
    deadline = time.monotonic() + 20
    while not node.failures:
        assert time.monotonic() < deadline, "the loss was not reported"
        loop.run_once(0.1)
    assert "is lost: died without leaving" in str(node.failures[0])
    loop.forget(rank.channel.fileno())
    loop.forget(rank.pidfd)
    loop.close()
