"""What ends a job, on real ranks: a bug in the trainer, a disagreement, kill -9 of a rank or its node."""
from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.trainer import process


def total(name="x"):
    return float(bpsfast.push_pull(np.ones(1000), False, name)[0])


class Uncaught(BaseException):
    """Not caught by the process that runs the ranks' functions."""


def push_until_it_ends(who):
    total("failing")
    if bpsfast.rank() == who:
        raise Uncaught("a bug in the trainer")
    total("failing")


def test_an_uncaught_exception_ends_the_others_in_words(job):
    started = job(ranks=(2, 1), transport="tcp")
    begin = time.monotonic()
    outcomes = started.attempt(push_until_it_ends, 1)
    assert outcomes[1].error == "died"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "PeerLostError" and "rank 1" in outcome.text and "a bug in the trainer" in outcome.text
    assert time.monotonic() - begin < 15
    started.kill()


def disagree():
    """Rank 0 ends by the disagreement; rank 1 looks only when the job was aborted for that."""
    if bpsfast.rank() == 0:
        try:
            bpsfast.push_pull(np.ones(4), True, "average or not")
        except bpsfast.MismatchError as exc:
            raise Uncaught(str(exc)) from exc
    bpsfast.declare("average or not", (4,), "float64", average=False)
    while not process.current().port._port.state()[0]:
        os.sched_yield()
    bpsfast.push_pull(np.ones(4), False, "average or not")


@pytest.mark.parametrize("ranks", [(2,), (1, 1)])
def test_a_mismatch_is_not_hidden_by_the_loss_that_follows(job, ranks):
    started = job(ranks=ranks, transport="tcp")
    outcomes = started.attempt(disagree)
    assert outcomes[0].error == "died"
    assert outcomes[1].error == "MismatchError" and "average differs" in outcomes[1].text, outcomes
    started.kill()


def push_for_ever():
    while True:
        total("for ever")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", ["rank 1", "node 0", "node 1"])
def test_kill_9_while_pushing(job, victim):
    started = job(ranks=(2, 1), helpers=1, transport="tcp")  # its end is noticed, not its silence: no short lease
    started.run(total, "for ever")
    started.begin(push_for_ever)
    if victim.startswith("rank"):
        started.kill_rank(1)
    else:
        started.kill_daemon(victim)
    outcomes = started.outcomes(timeout_s=100)
    for rank, outcome in enumerate(outcomes):
        if victim == f"rank {rank}":
            assert outcome.error == "died"
        else:
            assert outcome.error == "PeerLostError", outcome
            assert victim.split()[0] in outcome.text
            if victim == "node 0" and rank < 2:
                assert f"node 0 (pid {started.daemons[victim].pid} on this machine) is lost" in outcome.text
                assert "SIGKILL" in outcome.text
    started.kill()


def fork_a_child():
    """Fork a child that holds every descriptor; return its process id."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


def test_kill_9_of_a_rank_whose_children_live_on(job):
    started = job(ranks=(2,))
    started.run(total, "for ever")
    children = started.run(fork_a_child)
    try:
        started.begin(push_for_ever)
        begin = time.monotonic()
        started.kill_rank(1)
        [outcome] = started.outcomes(only=(0,))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    assert outcome.error == "PeerLostError" and "rank 1" in outcome.text
    assert time.monotonic() - begin < 10
    started.kill()
