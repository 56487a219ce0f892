"""Signs of life by the kernel's report: over sockets, and of nodes whose control loop does nothing."""
from __future__ import annotations

import os
import socket
import time

import pytest

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.zmq_connections import ConnectionActivity
from tests.orchestration.test_scheduler import LIMIT_S, join, start as start  # a fixture

LEASE_S = 0.6


@pytest.fixture
def pair():
    """Return connections, each as (here, there)."""
    opened = [socket.create_server(("127.0.0.1", 0))]

    def connect():
        there = socket.create_connection(opened[0].getsockname())
        here = opened[0].accept()[0]
        opened.extend((here, there))
        return here, there

    yield connect
    for each in opened:
        each.close()


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_silence_is_counted_from_the_last_byte(pair):
    here, there = pair()
    pulses = ConnectionActivity()
    assert pulses.silence_s(b"a") is None
    there.send(b"x")
    here.recv(1)
    pulses.note_message(b"a", here.fileno())
    until(lambda: pulses.silence_s(b"a") >= 0.2)
    begin = time.monotonic()
    there.send(b"x")  # nobody reads it
    until(lambda: pulses.silence_s(b"a") <= time.monotonic() - begin + 0.02)
    assert here.recv(1) == b"x", "the connection is as it was"


def test_a_connection_that_is_gone_and_whose_number_another_one_has(pair):
    pulses = ConnectionActivity()
    here, _ = pair()
    fd = here.fileno()
    pulses.note_message(b"a", fd)
    here.close()
    assert pulses.silence_s(b"a") is None
    (first, _), (second, _) = pair(), pair()
    fd = first.fileno()
    pulses.note_message(b"a", fd)
    os.dup2(second.fileno(), fd)
    assert pulses.silence_s(b"a") is None
    pulses.note_message(b"b", fd)
    assert pulses.silence_s(b"b") is not None and pulses.silence_s(b"a") is None


def test_who_dials_anew_is_felt_over_the_new_connection(pair):
    pulses = ConnectionActivity()
    (old, _), (new, there) = pair(), pair()
    pulses.note_message(b"a", old.fileno())
    pulses.note_message(b"a", new.fileno())
    there.send(b"x")
    until(lambda: pulses.silence_s(b"a") < 0.1)
    pulses.note_message(b"b", old.fileno())
    assert pulses.silence_s(b"a") is not None and pulses.silence_s(b"b") is not None


def test_no_connection_at_all():
    pulses = ConnectionActivity()
    pulses.note_message(b"a", None)
    pulses.note_message(b"b", 1 << 20)
    assert pulses.silence_s(b"a") is None and pulses.silence_s(b"b") is None


def job_of_two(start, **fields):
    """A worker, and a helper whose control loop does nothing more once it was welcomed."""
    scheduler, _ = start(num_nodes=1, num_helpers=1, lease_s=LIMIT_S, helper_lease_s=LEASE_S)
    worker, helper = (start.node(scheduler.port, lease_s=LIMIT_S, **fields) for _ in range(2))
    worker.send(join("a", 1))
    helper.send(join("b", 0))
    worker.wait(m.Welcome)
    helper.wait(m.Welcome)
    return worker, helper


def hears_of_a_loss(worker, seconds):
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        worker.poller.poll(50)
        worker.received += worker.membership.recv_nowait(time.monotonic())
        worker.membership.tick(time.monotonic())
        if any(isinstance(message, m.Freeze) for message in worker.received):
            return True
    return False


def test_a_helper_that_only_libzmq_speaks_for_is_alive(start):
    worker, _ = job_of_two(start, pulse_s=LEASE_S / 4)
    assert not hears_of_a_loss(worker, 4 * LEASE_S)


def test_a_helper_that_nothing_is_heard_of_is_done_without(start):
    begin = time.monotonic()
    worker, _ = job_of_two(start)
    assert hears_of_a_loss(worker, LIMIT_S / 2) and time.monotonic() - begin >= LEASE_S
    (freeze,) = [message for message in worker.received if isinstance(message, m.Freeze)]
    assert freeze.lost == (1,) and f"(helper_lease_s = {LEASE_S:g})" in freeze.reason


def test_a_worker_that_nothing_is_heard_of_has_its_own_lease(start):
    scheduler, _ = start(num_nodes=2, lease_s=LIMIT_S, helper_lease_s=LEASE_S)
    here, _ = nodes = [start.node(scheduler.port, lease_s=LIMIT_S) for _ in range(2)]
    for host, node in zip("ab", nodes):
        node.send(join(host, 1))
    here.wait(m.Welcome)
    until_s = time.monotonic() + 3 * LEASE_S
    while time.monotonic() < until_s:
        here.poller.poll(50)
        here.received += here.membership.recv_nowait(time.monotonic())
        here.membership.tick(time.monotonic())
    assert not any(isinstance(message, m.Abort) for message in here.received)
