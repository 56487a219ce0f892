"""The executor: jobs in order, inline where that is their turn, each with its end, whatever becomes of them."""
from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.collectives.serial_executor import SerialExecutor
from bpsfast.orchestration.errors import BusyError, ClosedError

TIMEOUT_S = 20.0


@pytest.fixture
def executor(no_leaks):
    made = SerialExecutor("group 'x'")
    yield made
    assert made.close(TIMEOUT_S)


def nothing(_):
    """Done, and nobody cares."""


class Gate:
    """A job that says when it runs and goes on when it may."""

    def __init__(self):
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.open.wait(TIMEOUT_S)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_jobs_run_one_by_one_in_the_order_of_their_calls(inlines):
    executor, order, ends, inside = SerialExecutor("x"), [], [], []

    def job(i):
        inside.append(i)
        assert inside == [i], "one at a time"
        order.append(i)
        inside.pop()

    for i, inline in enumerate(inlines):
        executor.run(lambda i=i: job(i), lambda error, i=i: ends.append((i, error)), inline)
    assert executor.close(TIMEOUT_S)
    assert order == list(range(len(inlines))) and sorted(ends) == [(i, None) for i in range(len(inlines))]


def test_a_job_that_is_waited_for_runs_in_its_callers_thread(executor):
    seen = []
    executor.run(lambda: seen.append(threading.current_thread()), seen.append, inline=True)
    assert seen == [threading.current_thread(), None] and threading.active_count() == 1, "no thread was needed"


def test_a_job_that_is_waited_for_does_not_overtake(executor):
    gate, seen, done = Gate(), [], threading.Event()
    executor.run(gate, lambda error: seen.append("first"), inline=False)
    assert gate.entered.wait(TIMEOUT_S)
    executor.run(lambda: seen.append(threading.current_thread()), lambda error: done.set(), inline=True)
    assert not seen
    gate.open.set()
    assert done.wait(TIMEOUT_S)
    assert seen[0] == "first" and seen[1] is not threading.current_thread()


def test_a_thread_does_not_overtake_a_job_that_runs_inline(executor):
    gate, order, done = Gate(), [], threading.Event()
    inline = threading.Thread(target=executor.run, args=(gate, lambda error: order.append(1), True))
    inline.start()
    assert gate.entered.wait(TIMEOUT_S)
    executor.run(lambda: order.append(2), lambda error: done.set(), inline=False)
    gate.open.set()
    inline.join(TIMEOUT_S)
    assert done.wait(TIMEOUT_S) and sorted(order) == [1, 2]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_a_job_raises_is_told_and_ends_nothing(executor, kind, inline):
    errors, done = [], threading.Event()
    error = kind("no")

    def fail():
        raise error

    executor.run(fail, errors.append, inline)
    executor.run(lambda: None, lambda error: (errors.append(error), done.set()), inline)
    assert done.wait(TIMEOUT_S) and errors == [error, None]


@pytest.mark.parametrize("inline", [False, True])
def test_a_job_cannot_give_another_one(executor, inline):
    done, errors = threading.Event(), []
    executor.run(lambda: executor.run(lambda: None, errors.append, inline),
                 lambda error: (errors.append(error), done.set()), inline)
    assert done.wait(TIMEOUT_S) and len(errors) == 1 and isinstance(errors[0], BusyError)
    executor.run(lambda: None, errors.append, inline=False)


def test_close_lets_jobs_end_and_takes_no_more(no_leaks):
    executor, gate, ends = SerialExecutor("group 'x'"), Gate(), []
    for job in (gate, lambda: None, lambda: None):
        executor.run(job, ends.append, inline=False)
    assert gate.entered.wait(TIMEOUT_S)
    assert not executor.close(0.0), "one does not end"
    with pytest.raises(ClosedError, match="group 'x' is closed"):
        executor.run(lambda: None, ends.append, inline=True)
    assert not ends
    gate.open.set()
    assert executor.close(TIMEOUT_S) and ends == [None] * 3


def test_a_job_may_close_its_executor(no_leaks):
    executor, closed, done = SerialExecutor("x"), [], threading.Event()
    executor.run(lambda: closed.append(executor.close(TIMEOUT_S)), lambda error: done.set(), inline=False)
    assert done.wait(TIMEOUT_S) and closed == [True]
    assert executor.close(TIMEOUT_S)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")  # the latter: JAX's
def test_a_fork_has_no_thread_and_is_told_so(executor):
    gate = Gate()
    executor.run(gate, lambda error: None, inline=False)
    assert gate.entered.wait(TIMEOUT_S)
    with executor._condition:
        child = os.fork()
        if child == 0:
            try:
                assert executor.close(TIMEOUT_S)
                executor.run(lambda: None, lambda error: None, inline=False)
            except ClosedError:
                os._exit(7)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    gate.open.set()


def test_what_is_told_may_call_again_and_wait_for_it(executor):
    """As torch's PowerSGD does: the second half of a compressed sum is called from the future of the first."""
    depth, over = 4, threading.Event()

    def tell(level):
        def done(error):
            if level == depth:
                over.set()
                return
            inner = threading.Event()
            executor.run(lambda: None, lambda error: (tell(level + 1)(error), inner.set()), inline=False)
            assert inner.wait(TIMEOUT_S)

        return done

    executor.run(lambda: None, tell(1), inline=False)
    assert over.wait(TIMEOUT_S)


def test_what_is_told_may_wait_for_calls_that_were_there_before(executor):
    begin, second, over = threading.Event(), threading.Event(), threading.Event()

    def done(error):
        if second.wait(TIMEOUT_S):
            over.set()

    executor.run(lambda: begin.wait(TIMEOUT_S), done, inline=False)
    executor.run(lambda: None, lambda error: second.set(), inline=False)
    begin.set()
    assert over.wait(TIMEOUT_S)


def test_all_threads_that_callbacks_have_needed_end(no_leaks):
    executor, gates, ends = SerialExecutor("x"), [Gate() for _ in range(4)], []
    for gate in gates:  # each end is told by a thread that is held up meanwhile
        executor.run(lambda: None, lambda error, gate=gate: gate(), inline=False)
        assert gate.entered.wait(TIMEOUT_S)
    assert len(executor._threads) == 4
    for gate in gates:
        gate.open.set()
    running = Gate()
    executor.run(running, ends.append, inline=False)
    assert running.entered.wait(TIMEOUT_S)
    executor.run(lambda: None, ends.append, inline=False)
    closed = []
    closer = threading.Thread(target=lambda: closed.append(executor.close(5.0)))
    closer.start()
    while not executor._closing or executor._n_in_done:
        os.sched_yield()
    running.open.set()
    closer.join(TIMEOUT_S)
    assert closed == [True] and ends == [None, None]
