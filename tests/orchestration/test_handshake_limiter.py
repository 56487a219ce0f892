"""Who has not proved the key costs a ZeroMQ server little, and those who have are let alone."""
from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time

import pytest
import zmq

from bpsfast.orchestration import zmq_connections
from bpsfast.orchestration.security import curve_pair
from bpsfast.orchestration.zmq_connections import (
    MAX_PENDING_HANDSHAKES,
    PENDING_MAX_NBYTES,
    ZmqHandshakeLimiter,
    interface,
)
from tests.support.closed_connections import is_over

KEY = secrets.token_bytes(32)
LIMIT_S = 20.0
#: A ZMTP 3.1 greeting with the mechanism CURVE, as a client sends it.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)


class Server:
    """A CURVE server that reads what it is sent, and its handshake limiter."""

    def __init__(self, context, n_members=0):
        self.socket = context.socket(zmq.ROUTER)
        self.limiter = ZmqHandshakeLimiter(self.socket, n_members)
        self.socket.linger = 0
        self.socket.maxmsgsize = 16 << 20
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = curve_pair(KEY, "scheduler")
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.received = []

    def turn(self):
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.limiter.monitor, zmq.POLLIN)
        poller.poll(20)
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                self.limiter.note_message(frames[-1])
                self.received.append(frames[-1].bytes)
        self.limiter.update()

    def until(self, condition):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            self.turn()

    def call(self):
        return socket.create_connection(("127.0.0.1", self.port), LIMIT_S)


@pytest.fixture
def context(no_leaks):
    with zmq.Context() as made:
        yield made


@pytest.fixture
def server(context):
    made = Server(context)
    yield made
    made.limiter.close()
    made.socket.close()


@pytest.fixture
def member(context, server):
    """A client that has the key."""
    client = context.socket(zmq.DEALER)
    client.linger = 0
    client.curve_publickey, client.curve_secretkey = curve_pair(KEY, "node")
    client.curve_serverkey = curve_pair(KEY, "scheduler")[0]
    client.reconnect_ivl = 20
    client.connect(f"tcp://127.0.0.1:{server.port}")
    yield client
    client.close()


def test_a_connection_whose_descriptor_is_another_ones_by_now_is_not_counted(server, monkeypatch):
    pair = socket.socketpair()
    events = [(int(zmq.EVENT_ACCEPTED), pair[0].fileno())]
    monkeypatch.setattr(zmq_connections, "monitor_event", lambda monitor: (monitor.recv_multipart(), events.pop())[1])
    with pair[0], pair[1]:
        with server.call():
            server.until(lambda: not events)
            assert server.limiter.n_strangers == 0
        monkeypatch.undo()


def test_an_endless_handshake_is_cut_off(server):
    with server.call() as stranger:
        stranger.sendall(GREETING + b"\x06" + struct.pack(">Q", 15 << 20))
        stranger.setblocking(False)
        n_sent = 0

        def says_more():
            nonlocal n_sent
            try:
                while True:
                    n_sent += stranger.send(bytes(64 << 10))
            except BlockingIOError:
                return True
            except OSError:
                return False

        server.until(lambda: not says_more())
        assert server.limiter.n_cut == 1 and n_sent > PENDING_MAX_NBYTES
    server.until(lambda: not server.limiter.n_strangers)


def test_who_has_proved_the_key_may_say_much(server, member):
    member.send(b"first")
    server.until(lambda: server.received)
    assert server.limiter.n_strangers == 0
    for _ in range(3):
        member.send(bytes(8 << 20))
    server.until(lambda: len(server.received) == 4)
    assert server.limiter.n_cut == 0


def test_a_member_is_no_stranger_because_its_first_message_was_not_read_yet(server, member):
    """As when all nodes of a job come back at once, each with a report of some MB."""
    member.send(b"first")
    member.send(bytes(8 << 20))
    poller = zmq.Poller()
    poller.register(server.socket, zmq.POLLIN)
    assert poller.poll(1000 * LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while not any(map(server.limiter._has_sent_too_much, server.limiter._limiter)):  # before anything is read
        assert time.monotonic() < deadline
        server.limiter.update()
    server.limiter.update()
    assert server.limiter.n_cut == 0 and server.limiter.n_strangers == 1
    server.until(lambda: len(server.received) == 2)
    assert server.limiter.n_cut == 0 and server.limiter.n_known == 1


def test_of_too_many_strangers_the_oldest_go_and_a_member_comes_in(server, member):
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(MAX_PENDING_HANDSHAKES + 50):
            strangers.append(stack.enter_context(server.call()))
            server.turn()
        member.send(b"first")
        server.until(lambda: server.received)
        server.until(lambda: sum(map(is_over, strangers)) >= 50)
        assert server.limiter.n_strangers <= MAX_PENDING_HANDSHAKES
    server.until(lambda: not server.limiter.n_strangers)


def test_a_flood_from_one_host_cuts_nobody_off_who_comes_from_another(server):
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), LIMIT_S, ("127.0.0.2", 0)))
        strangers = [stack.enter_context(server.call())]
        server.until(lambda: server.limiter.n_strangers == 2)
        while len(strangers) < MAX_PENDING_HANDSHAKES + 50:
            strangers.append(stack.enter_context(server.call()))
            server.turn()
        server.until(lambda: sum(map(is_over, strangers)) >= 50)
        assert not is_over(other)


def test_a_silent_stranger_is_gone_when_the_handshakes_time_is_over(server):
    with server.call() as stranger:
        server.until(lambda: server.limiter.n_strangers == 1)
        server.until(lambda: is_over(stranger))
    server.until(lambda: not server.limiter.n_strangers)


@pytest.mark.parametrize(("host", "bound"), [
    ("127.0.0.1", "127.0.0.1"), ("192.0.2.1", "*"), ("localhost", "*"), ("", "*")])
def test_only_an_address_of_this_machine_is_bound_alone(host, bound):
    assert interface(host) == bound


def test_who_has_ended_is_not_known_for_what_is_read_afterwards(context, server, member):
    """Else a scheduler whose job is over waits a lease for somebody who is gone."""
    member.send(b"first")
    server.until(lambda: server.limiter.n_known == 1)
    member.linger = 1000
    member.send(b"last")
    member.close()
    deadline = time.monotonic() + LIMIT_S
    while server.limiter.n_known:
        assert time.monotonic() < deadline
        server.limiter.monitor.poll(20)
        server.limiter.update()
    server.until(lambda: server.received == [b"first", b"last"])
    assert server.limiter.n_known == 0


def test_all_members_may_connect_at_once(monkeypatch):
    """Or a thousand nodes that start together would push each other out for as long as they try."""
    monkeypatch.setattr("bpsfast.orchestration.zmq_connections.MAX_PENDING_HANDSHAKES", 4)
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        server = Server(context, n_members=40)
        stack.callback(server.socket.close)
        stack.callback(server.limiter.close)
        for _ in range(43):  # with room for one more
            stack.enter_context(server.call())
        server.until(lambda: server.limiter.n_strangers == 43)
        assert server.limiter.n_cut == 0
        stack.enter_context(server.call())
        server.until(lambda: server.limiter.n_cut == 1)
