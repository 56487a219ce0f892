"""Forked children of a rank: refused at once whatever was held at the fork, and no burden to the parent."""
from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading

import numpy as np
import pytest

import bpsfast
from bpsfast.trainer import process


@pytest.fixture
def pair(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def total(name="x"):
    return float(bpsfast.push_pull(np.ones(1000), False, name)[0])


def fork():
    """Use the session in a forked child, then go on in the parent."""
    total("before")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            bpsfast.push_pull(np.ones(1000), False, "before")
            text = "no error"
        except bpsfast.ClosedError as exc:
            text = str(exc)
        os.write(writer, text.encode())
        bpsfast.shutdown()
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reader, 4096).decode()
    os.close(reader)
    os.close(writer)
    return text, total("before")


def test_a_forked_child_has_no_session(pair):
    for text, after in pair.run(fork):
        assert "fork" in text and after == 3


def attempt(call):
    try:
        return f"no error, but {call()!r}"
    except bpsfast.ClosedError as exc:
        return str(exc)


def fork_beside_waits():
    """Fork while a thread waits in the port, a push is deferred and others hold the locks; what the child is told."""
    total("beside")
    if bpsfast.rank():
        bpsfast.barrier()
        return total("beside"), bpsfast.synchronize(bpsfast.push_pull_async(np.ones(9), False, "other"))[0]
    session = process.current()
    handle = bpsfast.push_pull_async(np.ones(1000), False, "beside")
    found = []
    waiter = threading.Thread(target=lambda: found.append(float(handle.wait()[0])))
    deferred = bpsfast.push_pull_async(np.ones(9), False, "other")
    waiter.start()
    while not session.port._inside:
        os.sched_yield()
    reader, writer = os.pipe()
    unit = session.tensors._units["beside"]
    with session._mailbox._condition, session._lock, session.memory._lock, session.tensors._lock:
        child = os.fork()
        if child == 0:
            calls = (deferred.wait, deferred.done, lambda: unit.wait(unit.round, 40), lambda: total("beside"),
                     bpsfast.barrier, bpsfast.rank)
            os.write(writer, "|".join(map(attempt, calls)).encode())
            bpsfast.shutdown()
            os._exit(0)
    os.close(writer)
    in_time = select.select([reader], [], [], 20.0)[0]
    if not in_time:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    answers = os.read(reader, 1 << 16).decode().split("|")
    os.close(reader)
    bpsfast.barrier()
    waiter.join(20)
    return found[0], deferred.wait()[0], answers


def test_a_child_forked_beside_waits_is_refused_at_once(pair):
    first, *others = pair.run(fork_beside_waits)
    assert [tuple(each) for each in others] == [first[:2]] * 2 == [(3.0, 3.0)] * 2
    assert len(first[2]) == 6 and all("is a fork of rank 0" in answer for answer in first[2]), first[2]


def child_work(queue):
    queue.put(sum(range(100)))


def multiprocessing_children():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=child_work, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    during = total("during")
    found = [queue.get(timeout=20) for _ in children]
    for child in children:
        child.join(20)
    return during, found, [child.exitcode for child in children]


def test_children_that_fork_while_connected(pair):
    assert pair.run(multiprocessing_children) == [(3.0, [4950, 4950], [0, 0])] * 3
