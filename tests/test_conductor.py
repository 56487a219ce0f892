"""A conductor makes calls in their order, one at a time, whoever waits for them, and whatever is hung on them."""
from __future__ import annotations

import threading

import pytest

from bpsfast.collective.conductor import Conductor
from bpsfast.orchestration.errors import ClosedError

LIMIT_S = 20.0


@pytest.fixture
def conductor(no_leaks):
    made = Conductor("test")
    yield made
    assert made.close(LIMIT_S)


def nothing(_):
    """Done, and nobody cares."""


def test_jobs_run_in_the_order_of_their_calls_one_at_a_time(conductor):
    running, order, over = threading.Lock(), [], threading.Event()

    def job(i):
        assert running.acquire(blocking=False), "another one is running"
        order.append(i)
        running.release()

    for i in range(200):
        conductor.run(lambda i=i: job(i), nothing if i < 199 else lambda error: over.set(), inline=i % 7 == 0)
    assert over.wait(LIMIT_S) and order == list(range(200))


def test_a_job_that_is_waited_for_runs_in_its_callers_thread_if_it_is_its_turn(conductor):
    seen = []
    conductor.run(lambda: seen.append(threading.current_thread()), nothing, inline=True)
    assert seen == [threading.current_thread()]


def test_errors_are_told(conductor):
    told = []

    def job():
        raise KeyError("x")

    conductor.run(job, told.append, inline=True)
    assert [type(error) for error in told] == [KeyError]


def test_what_is_told_may_call_again_and_wait_for_it(conductor):
    """As torch's PowerSGD does: the second half of a compressed sum is called from the future of the first."""
    depth, over = 4, threading.Event()

    def tell(level):
        def done(error):
            if level == depth:
                over.set()
                return
            inner = threading.Event()
            conductor.run(lambda: None, lambda error: (tell(level + 1)(error), inner.set()), inline=False)
            assert inner.wait(LIMIT_S)

        return done

    conductor.run(lambda: None, tell(1), inline=False)
    assert over.wait(LIMIT_S)


def test_what_is_told_may_wait_for_calls_that_were_there_before(conductor):
    begin, second, over = threading.Event(), threading.Event(), threading.Event()

    def done(error):
        if second.wait(LIMIT_S):
            over.set()

    conductor.run(lambda: begin.wait(LIMIT_S), done, inline=False)
    conductor.run(lambda: None, lambda error: second.set(), inline=False)
    begin.set()
    assert over.wait(LIMIT_S)


def test_close_waits_for_what_is_there_and_refuses_more():
    conductor, begin, ran = Conductor("closing"), threading.Event(), []
    conductor.run(lambda: begin.wait(LIMIT_S), nothing, inline=False)
    conductor.run(lambda: ran.append(1), nothing, inline=False)
    assert not conductor.close(0.0), "a job is under way"
    with pytest.raises(ClosedError, match="closing is closed"):
        conductor.run(lambda: None, nothing, inline=False)
    begin.set()
    assert conductor.close(LIMIT_S) and ran == [1]
