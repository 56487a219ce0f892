"""Who is missing: named when the time is up, and soon if it has left; what was announced before leaving counts."""
from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.base.message_socket import MessageSocket
from bpsfast.orchestration.messages import StallAnswer, StallQuestion
from bpsfast.trainer import process
from bpsfast.trainer.node_connection import Mailbox, NodeRequests
from bpsfast.trainer.stall_inspector import StallQuery


def total(name="x"):
    return float(bpsfast.push_pull(np.ones(1000), False, name)[0])


def short_barrier():
    bpsfast.barrier(timeout_s=0.3)


def lone_declaration():
    bpsfast.push_pull(np.ones(4, np.float32), name="only mine")


def test_what_not_all_enter_or_declare_names_who_is_missing(job):
    started = job(ranks=(1, 1), timeout_s=1)
    started.begin(short_barrier, only=(0,))
    [outcome] = started.outcomes(only=(0,))
    assert outcome.error == "StallError" and "barrier 1: missing: rank 1" in outcome.text
    started.begin(lone_declaration, only=(0,))
    [outcome] = started.outcomes(only=(0,))
    assert outcome.error == "StallError" and "'only mine'" in outcome.text and "missing: rank 1" in outcome.text
    started.kill()


def uneven(then):
    """Push twice; rank 0 leaves, the others "push", "declare" or enter a "barrier": how long that took, the error."""
    total("uneven")
    total("uneven")
    begin = time.monotonic()
    if bpsfast.rank() == 0:
        bpsfast.shutdown()
        return 0.0, ""
    calls = {"push": lambda: total("uneven"), "declare": lambda: total("mine"), "barrier": bpsfast.barrier}
    try:
        calls[then]()
    except bpsfast.StallError as exc:
        return time.monotonic() - begin, str(exc)
    return 0.0, "no error"


@pytest.mark.parametrize(("ranks", "then"), [((2,), "push"), ((1, 1), "push"), ((2,), "declare"), ((2,), "barrier")])
def test_a_rank_that_left_is_not_waited_for(job, ranks, then):
    started = job(ranks=ranks, transport="tcp", timeout_s=50)
    values = started.run(uneven, then, timeout_s=45)
    waited_s, text = values[1]
    assert "missing: rank 0" in text and "has called shutdown. Waiting on cannot help" in text, text
    assert waited_s < 20, "soon, and not after timeout_s"
    started.kill()


def leave_with_a_push_under_way():
    """Rank 0 announces its part and leaves; the others push only when they know that it has."""
    total("announced")
    if bpsfast.rank() == 0:
        bpsfast.push_pull_async(np.ones(1000), False, "announced")
        bpsfast.shutdown()
        return 3.0
    while not process.current().stall_query.has_departures():
        os.sched_yield()
    return total("announced")


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_what_was_announced_before_leaving_counts(job, ranks):
    started = job(ranks=ranks, transport="tcp")
    assert started.run(leave_with_a_push_under_way) == [3.0] * 3
    started._attached = False
    started.kill()


@pytest.fixture
def asked():
    """A stall query, and the channel on which a node reads its questions."""
    ours, theirs = socket.socketpair()
    pidfd = os.pidfd_open(os.getpid())
    mailbox = Mailbox(MessageSocket(ours), pidfd, lambda message, fds: questions.receive(message.question, message),
                      lambda: None, lambda: bpsfast.PeerLostError("the node is lost"))
    questions = NodeRequests(60.0, mailbox)
    stall_query = StallQuery(0, questions)
    with MessageSocket(theirs) as node:
        yield stall_query, node
    mailbox.close()
    os.close(pidfd)


def read(node, n):
    found = []
    while len(found) < n:
        found.append(node.recv(20)[0])
        assert isinstance(found[-1], StallQuestion)
    return found


def test_threads_that_ask_the_same_all_get_an_answer(asked):
    stall_query, node = asked
    found = []
    threads = [threading.Thread(target=lambda: found.append(stall_query.ask(5, 1, "w"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for question in read(node, 3):
        node.post(StallAnswer(rank=0, question=question.question, missing="missing: rank 2", stage="push",
                              hopeless=True, ranks=(2,)))
    for thread in threads:
        thread.join(20)
    assert [(each.missing, each.hopeless, each.ranks) for each in found] == [("missing: rank 2", True, (2,))] * 3


def test_a_late_answer_is_not_taken_for_that_to_the_next_question(asked):
    stall_query, node = asked
    node.post(StallAnswer(rank=0, question=0, missing="missing: rank 9, as of long ago", stage="push"))
    found = []
    thread = threading.Thread(target=lambda: found.append(stall_query.ask(5, 1, "w")))
    thread.start()
    [question] = read(node, 1)
    node.post(StallAnswer(rank=0, question=question.question, missing="missing: rank 2", stage="push"))
    thread.join(20)
    assert [(each.missing, each.hopeless) for each in found] == [("missing: rank 2", False)]
