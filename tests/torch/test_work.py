"""torch's Work: waiting, status, futures, and errors of torch's own class, in any order."""
from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bpsfast.collectives.serial_executor import SerialExecutor
from bpsfast.orchestration.errors import MismatchError, StallError
from bpsfast.torch.backend import work as works
from bpsfast.torch.backend.work import Work, torch_error

TIMEOUT_S = 20.0


@pytest.fixture
def work():
    return Work([torch.ones(2)], 5.0, "all_reduce")


@pytest.fixture
def losing(monkeypatch):
    """A torch that loses the Python half of works that only C++ refers to."""
    monkeypatch.setattr(works, "LOSES_PYTHON_WORK", True)
    monkeypatch.setattr(works, "_references", {})


@pytest.mark.parametrize("use", ["wait", "get_future"])
def test_a_work_is_kept_until_it_is_used(losing, use):
    made = Work([torch.ones(2)], 5.0, "all_reduce")
    alive = weakref.ref(made)
    made.finish(None)
    del made
    gc.collect()
    assert alive() is not None
    getattr(alive(), use)()
    gc.collect()
    assert alive() is None


def test_works_that_nobody_waits_for_are_not_kept_for_ever(losing):
    alive = [weakref.ref(Work([], 5.0, "all_reduce")) for _ in range(works._MAX_REFERENCES + 3)]
    gc.collect()
    assert [each() is None for each in alive] == [True] * 3 + [False] * works._MAX_REFERENCES


def test_before_and_after(work):
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    work.finish(None, 3)
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    assert work.source_rank() == work._source_rank() == 3
    assert [each.tolist() for each in work.result()] == [[1, 1]]
    work.synchronize()


def test_a_failure_is_torchs_error_with_ours_as_its_cause(work):
    cause = MismatchError("members called different collectives")
    work.finish(cause)
    assert work.is_completed() and not work.is_success()
    for call in (work.wait, work.synchronize):
        with pytest.raises(dist.DistBackendError, match="MismatchError: members called different") as raised:
            call()
        assert raised.value.__cause__ is cause and work.exception() is raised.value


def test_what_is_late_says_timeout_and_what_is_not_ours_stays():
    assert "(the timeout of the call was reached)" in str(torch_error(StallError("rank 1 is missing")))
    error = KeyError("a bug")
    assert torch_error(error) is error


def test_a_wait_may_have_a_time_of_its_own_and_the_call_goes_on(work):
    with pytest.raises(TimeoutError, match=r"all_reduce was not complete within 0\.01 s"):
        work.wait(timedelta(seconds=0.01))
    work.finish(None)
    assert work.wait(timedelta(seconds=0.01)) and work.wait(timedelta(0))


def test_waiting_threads_are_all_woken(work, no_leaks):
    seen = []
    waiters = [threading.Thread(target=lambda: seen.append(work.wait())) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    work.finish(None)
    for waiter in waiters:
        waiter.join(TIMEOUT_S)
    assert seen == [True] * 3


@pytest.mark.parametrize("first", ["future", "finish"])
def test_a_future_has_the_tensors_whether_it_was_asked_for_before_or_after(work, first):
    if first == "finish":
        work.finish(None)
    future = work.get_future()
    assert future is work.get_future() and future.done() == (first == "finish")
    seen = []
    follower = future.then(lambda each: seen.append(each.value()) or 7)
    if first == "future":
        assert not seen
        work.finish(None)
    assert [x.tolist() for x in future.wait()] == [[1, 1]]
    assert follower.wait() == 7 and [x.tolist() for x in seen[0]] == [[1, 1]]


@pytest.mark.parametrize("first", ["future", "finish"])
def test_a_failure_is_the_futures_own_error_and_no_value(work, first):
    if first == "finish":
        work.finish(StallError("rank 1 has not pushed"))
    future = work.get_future()
    if first == "future":
        work.finish(StallError("rank 1 has not pushed"))
    for look in (future.wait, future.value):
        with pytest.raises(RuntimeError, match="rank 1 has not pushed"):
            look()
    with pytest.raises(RuntimeError, match="rank 1 has not pushed"):
        torch.futures.collect_all([future]).wait()[0].wait()


def test_futures_asked_for_while_the_call_ends_are_complete():
    for _ in range(200):
        work, found = Work([], 5.0, "barrier"), []
        asker = threading.Thread(target=lambda work=work, found=found: found.append(work.get_future()))
        asker.start()
        work.finish(None)
        asker.join(TIMEOUT_S)
        assert found[0].wait() == []


def test_a_work_that_nobody_keeps_is_carried_out_and_its_memory_kept_until_then(no_leaks):
    executor, go_on, done = SerialExecutor("x"), threading.Event(), threading.Event()
    tensor = torch.zeros(3)
    memory = weakref.ref(tensor)
    work = Work([tensor], 5.0, "all_reduce")
    future = work.get_future()
    future.add_done_callback(lambda each: done.set())
    seen = []

    def job():
        assert go_on.wait(TIMEOUT_S)
        seen.append(memory() is not None)

    executor.run(job, work.finish, inline=False)
    del work, future, tensor
    gc.collect()
    go_on.set()
    assert done.wait(TIMEOUT_S) and seen == [True]
    assert executor.close(TIMEOUT_S)
    del job
    gc.collect()
    assert memory() is None


def test_what_a_callback_raises_keeps_no_other_call_from_its_end(no_leaks):
    executor, works = SerialExecutor("x"), [Work([], 5.0, "barrier") for _ in range(2)]

    def fail(future):
        raise ValueError("a user's mistake")

    works[0].get_future().add_done_callback(fail)
    then = works[0].get_future().then(fail)
    for work in works:
        executor.run(lambda: None, work.finish, inline=False)
    assert works[1].wait(timedelta(seconds=TIMEOUT_S)) and works[0].is_success()
    with pytest.raises(RuntimeError, match="a user's mistake"):
        then.wait()
    assert executor.close(TIMEOUT_S)
