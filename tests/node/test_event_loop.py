"""The event loop: descriptors, timers, calls from other threads, and handlers that raise."""
from __future__ import annotations

import os
import threading
import time

import pytest

from bpsfast.node.event_loop import EventLoop


@pytest.fixture
def errors():
    return []


@pytest.fixture
def loop(errors):
    made = EventLoop(errors.append)
    yield made
    made.close()


def test_readable_descriptors_call_their_handler_until_forgotten(loop):
    read_end, write_end = os.pipe()
    seen = []
    loop.watch(read_end, lambda: seen.append(os.read(read_end, 1)))
    os.write(write_end, b"ab")
    loop.run_once(5)
    loop.run_once(5)
    assert seen == [b"a", b"b"]
    os.write(write_end, b"c")
    loop.forget(read_end)
    loop.forget(read_end)
    loop.run_once(0)
    assert seen == [b"a", b"b"]
    os.close(read_end)
    os.close(write_end)


def test_timers_fire_in_order_and_once(loop):
    now = time.monotonic()
    fired = []
    for delay in (0.02, 0.0, 0.01):
        loop.call_at(now + delay, lambda delay=delay: fired.append(delay))
    while len(fired) < 3:
        loop.run_once(5)  # a timer ends the wait early
    assert fired == [0.0, 0.01, 0.02]


def test_other_threads_wake_the_loop(loop):
    called = []
    threading.Thread(target=lambda: loop.call_soon(lambda: called.append(threading.current_thread()))).start()
    while not called:
        loop.run_once(30)
    assert called == [threading.current_thread()]


def test_an_error_is_reported_and_the_loop_goes_on(loop, errors):
    def fail():
        raise ValueError("boom")

    done = []
    loop.call_soon(fail)
    loop.call_soon(lambda: done.append(1))
    loop.run_once(5)
    assert [str(error) for error in errors] == ["boom"] and done == [1]


def test_a_closed_loop_ignores_calls(errors):
    loop = EventLoop(errors.append)
    loop.close()
    loop.close()
    loop.call_soon(lambda: None)
