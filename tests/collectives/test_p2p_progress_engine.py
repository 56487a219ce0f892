"""Who moves messages on: what fails there unexpectedly ends the endpoint in words, and nobody waits for ever."""
from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from bpsfast.orchestration.errors import ProtocolError
from tests.support.p2p_endpoints import Endpoints

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def endpoints():
    with contextlib.closing(Endpoints()) as made:
        yield made


def receive(endpoint, tag=0):
    x = np.zeros(4, np.uint8)
    return endpoint.receive(1, 1 - endpoint.rank, tag, x.ctypes.data, x.nbytes, x)


def send(endpoint, tag=0):
    x = np.zeros(4, np.uint8)
    return endpoint.send(1, 1 - endpoint.rank, tag, x.ctypes.data, x.nbytes, x)


def fail():
    raise ZeroDivisionError("a mistake of ours")


def exit_thread():
    raise SystemExit("of the thread")


@pytest.mark.parametrize("part", ["_work", "_check", "_settle"])
@pytest.mark.parametrize("error", [fail, exit_thread])
def test_an_unexpected_error_in_the_thread_ends_the_post_for_those_who_wait_for_callbacks(endpoints, part, error):
    progress, over = endpoints.endpoints[0].progress, threading.Event()
    usual = getattr(progress, part)

    def once():
        setattr(progress, part, usual)
        error()

    transfer = receive(endpoints.endpoints[0])
    transfer.on_done(lambda _: over.set())
    setattr(progress, part, once)
    assert over.wait(10)
    assert isinstance(transfer.error, ProtocolError)
    assert "bpsfast-p2p-0 failed: " in str(transfer.error)
    with pytest.raises(ProtocolError, match="bpsfast-p2p-0 failed: "):
        send(endpoints.endpoints[0])


def test_an_unexpected_error_ends_the_wait_in_which_it_happens(endpoints):
    progress = endpoints.endpoints[0].progress
    transfer = receive(endpoints.endpoints[0])
    progress._work = fail  # from now on, and each time
    with pytest.raises(ProtocolError, match="ZeroDivisionError: a mistake of ours"):
        transfer.wait()
    progress._work = lambda: False


def test_what_goes_on_failing_keeps_no_core_busy(endpoints):
    progress, over, n_tried = endpoints.endpoints[0].progress, threading.Event(), []

    def fail_again():
        n_tried.append(1)
        if len(n_tried) == 3:
            over.set()
        fail()

    progress._work = fail_again
    assert not over.wait(0.9), "once a second after the first time"
    assert over.wait(10)
    progress._work = lambda: False


def test_a_callback_that_ends_its_thread_does_not_end_the_post(endpoints):
    over = threading.Event()
    transfer = receive(endpoints.endpoints[0])
    transfer.on_done(lambda _: exit_thread())
    transfer.on_done(lambda _: over.set())
    send(endpoints.endpoints[1]).wait()
    assert over.wait(10)
    again = receive(endpoints.endpoints[0], 1)
    again.on_done(lambda _: over.set())
    over.clear()
    send(endpoints.endpoints[1], 1).wait()
    assert over.wait(10)
