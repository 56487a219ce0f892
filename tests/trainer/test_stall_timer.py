"""One wait: when it asks who is missing, warns, gives up, and what is told once it is over. No test waits itself."""
from __future__ import annotations

import math
import os
import re
import socket
from types import SimpleNamespace

import pytest

import bpsfast
from bpsfast.base.message_socket import MessageSocket
from bpsfast.orchestration.errors import StallError
from bpsfast.orchestration.messages import StallAnswer
from bpsfast.trainer.node_connection import Mailbox, NodeRequests
from bpsfast.trainer.stall_inspector import DOUBT_S, StallInspector, StallQuery, StallTimer, Subject

SUBJECT = Subject.of("w", ["w"], 0, 1, 3)
MISSING = StallAnswer(rank=0, question=1, missing="missing: rank 2", stage="push", ranks=(2,))
HOPELESS = StallAnswer(rank=0, question=1, missing="missing: rank 2, gone", stage="push", ranks=(2,), hopeless=True)


@pytest.fixture
def stall_query():
    ours, theirs = socket.socketpair()
    pidfd = os.pidfd_open(os.getpid())
    mailbox = Mailbox(MessageSocket(ours), pidfd, lambda message, fds: None, lambda: None,
                      lambda: bpsfast.PeerLostError("the node is lost"))
    with MessageSocket(theirs):
        yield StallQuery(0, NodeRequests(60.0, mailbox))
    mailbox.close()
    os.close(pidfd)


class Wait:
    """A wait that has lasted *spent_s*, what it asked, and what its inspector counted."""

    def __init__(self, stall_query, spent_s, answer=MISSING, timeout_s=60.0, warn_s=0.0, what="", is_there=False):
        self.n_asked = self.n_stalls = 0
        self.answer, self.is_there = answer, is_there
        self.inspector = StallInspector("rank 0", warn_s, self.count)
        self.patience = StallTimer("rank 0", timeout_s, stall_query, self.inspector, what, spent_s)

    def count(self):
        self.n_stalls += 1

    def ask(self):
        self.n_asked += 1
        return SUBJECT, self.answer

    def look(self):
        self.patience.look(self.ask, lambda: self.is_there)


def test_who_looks_often_asks_about_departures_too(stall_query, monkeypatch):
    """A direct wait looks every tenth of a second, or more often while pushes are deferred."""
    now_s = [1000.0]
    monkeypatch.setattr("bpsfast.trainer.stall_inspector.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    stall_query.has_departures = lambda: True
    wait = Wait(stall_query, 0.0, HOPELESS)
    with pytest.raises(StallError, match="missing: rank 2, gone"), wait.patience:
        while now_s[0] < 1000 + 2 * DOUBT_S:
            now_s[0] += DOUBT_S / 10
            wait.look()
    assert wait.n_asked == 1


def test_nobody_is_asked_before_there_is_a_reason(stall_query):
    wait = Wait(stall_query, DOUBT_S + 1)
    with wait.patience:
        assert wait.patience.rest_s == 0, "somebody may have left"
        wait.look()
        assert 0 < wait.patience.rest_s <= DOUBT_S
    assert (wait.n_asked, wait.n_stalls, wait.inspector.stalls()) == (0, 0, ())


@pytest.mark.parametrize(("what", "words"), [
    ("", "rank 0 waited 60 s for round 3 of 'w' (partition 0 of 1): missing: rank 2"),
    ("in barrier 4", "rank 0 waited 60 s in barrier 4: missing: rank 2"),
])
def test_the_deadline_names_who_is_missing(stall_query, what, words):
    wait = Wait(stall_query, 61, what=what)
    with pytest.raises(StallError) as caught, wait.patience:
        wait.look()
    assert str(caught.value) == words and wait.n_asked == 1


def test_what_has_come_while_it_was_asked_is_no_error(stall_query):
    wait = Wait(stall_query, 61, is_there=True, warn_s=1)
    with wait.patience:
        wait.look()
    assert wait.n_asked == 1 and wait.n_stalls == 0


def test_who_has_left_is_waited_for_only_as_long_as_that_can_help(stall_query):
    stall_query.departed()
    wait = Wait(stall_query, DOUBT_S + 1)
    with wait.patience:
        wait.look()
        assert wait.n_asked == 1
        wait.look()
        assert wait.n_asked == 1, "not again at once"
    wait = Wait(stall_query, DOUBT_S + 1, HOPELESS)
    with pytest.raises(StallError, match=r"rank 0 waited 1\.5\d* s for round 3 of 'w' .*: missing: rank 2, gone"):
        with wait.patience:
            wait.look()


def test_a_warning_comes_at_doubling_intervals_and_its_end_is_told(stall_query, caplog):
    wait = Wait(stall_query, 5, warn_s=2)
    with wait.patience:
        wait.look()
        wait.look()
        (stall,) = wait.inspector.stalls()
        assert wait.n_asked == 1 and not stall.over and stall.missing_ranks == (2,)
        assert wait.patience.rest_s <= DOUBT_S
    (stall,) = wait.inspector.stalls()
    assert stall.over and stall.went_on and wait.n_stalls == 1
    told = [re.sub(r"5\.0\d s$", "5 s", record.message.split(" for ")[0]) for record in caplog.records]
    assert told == ["rank 0 has waited 5 s", "rank 0 goes on: it has waited 5 s"]


@pytest.mark.parametrize("how", ["error", "refused"])
def test_a_wait_that_ends_badly_does_not_go_on(stall_query, how):
    wait = Wait(stall_query, 5, warn_s=2)
    try:
        with wait.patience:
            wait.look()
            if how == "error":
                raise KeyboardInterrupt
            wait.patience.succeeded = False
    except KeyboardInterrupt:
        pass
    (stall,) = wait.inspector.stalls()
    assert stall.over and not stall.went_on


def test_without_warnings_only_doubt_and_deadline_count(stall_query):
    assert StallInspector("rank 0", 0.0, lambda: None).due(1.0) == math.inf
    assert Wait(stall_query, 0.0, timeout_s=0.1).patience.rest_s <= 0.1
