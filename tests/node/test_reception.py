"""The reception: whoever is not let in leaves nothing behind."""
from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import struct
import time

import pytest

from bpsfast.base import message_socket
from bpsfast.node import local_listener as door_of
from bpsfast.node.event_loop import EventLoop
from bpsfast.node.local_listener import LocalListener, bind
from bpsfast.node.transport import Epochs, shm
from bpsfast.orchestration import security
from bpsfast.orchestration.handshakes import MAX_PENDING_HANDSHAKES
from bpsfast.orchestration.messages import VERSION, Refuse
from bpsfast.pyx import ring
from bpsfast.pyx.pages import Segment
from tests.support.closed_connections import is_over

KEY = bytes(range(16))


@pytest.fixture
def shm_endpoint(no_leaks):
    with Segment(ring.DOORBELL_NBYTES) as doorbell, contextlib.closing(shm.ShmEndpoint(doorbell)) as made:
        ring.format_doorbell(doorbell)
        yield made


@pytest.fixture
def early(no_leaks):
    """A node's that does not know yet which one it is, on a loop that the test turns. Strangers have half a second."""
    listener = bind(KEY, f"test-{os.getpid()}")
    assert listener is not None
    clients = []
    with contextlib.closing(EventLoop(clients.append)) as loop:
        with contextlib.closing(LocalListener(loop, listener, KEY, clients.append, clients.append, clients.append,
                                          timeout_s=0.5)) as made:
            yield made, loop
    assert clients == [], "nobody was let in, and nothing failed"


@pytest.fixture
def reception(early, shm_endpoint):
    """Node 0's."""
    early[0].set_node(0, Epochs(1), shm_endpoint)
    return early


def test_a_node_whose_descriptors_cannot_be_mapped_is_refused_and_they_are_closed(reception, shm_endpoint):
    door, loop = reception
    reader, writer = os.pipe()
    hello = hello_of(1)
    with message_socket.connect(door.name, 20, shm.decode) as link, open(reader, "rb"), open(writer, "wb"):
        link.send(hello)
        answer, fds = turn(loop, link)
        assert isinstance(answer, shm.PeerWelcome)
        link.send(shm.PeerLane(), [fds[0], reader, shm_endpoint.pidfd])
        for fd in fds:
            os.close(fd)
        answer, _ = turn(loop, link)
        assert isinstance(answer, Refuse) and "node 1 passed a descriptor that cannot be mapped" in answer.reason


def turn(loop, link):
    """Turn *loop* until *link* has an answer; the suite's deadline ends what never comes."""
    while not (answers := link.recv_nowait()):
        loop.run_once(0.05)
    return answers[0]


def hello_of(source, key=KEY):
    """What node *source* says to node 0."""
    pid = os.getpid()
    return shm.PeerHello(version=VERSION, source=source, target=0, epoch=1, pid=pid,
                         proof=security.prove(key, *shm._proof_words("hello", source, 0, 1, pid)))


def until(loop, condition):
    """Turn *loop* until *condition* holds."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        loop.run_once(0.05)


def stranger(door):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect(door.name)
    return sock


def test_who_says_nothing_has_to_go(reception):
    door, loop = reception
    with stranger(door) as silent, stranger(door) as slow:
        slow.send(struct.pack("<I", 40))
        until(loop, lambda: len(door._unauthenticated) == 2)
        until(loop, lambda: is_over(silent) and is_over(slow))
    assert not door._unauthenticated


def test_of_strangers_beyond_a_number_the_oldest_go_and_a_node_comes_in(early, shm_endpoint):
    """Long before the strangers' time is over; and where nobody waits outside, nobody goes."""
    door, loop = early
    door._timeout_s = 60.0
    door.set_node(0, Epochs(1), shm_endpoint)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(stranger(door)) for _ in range(MAX_PENDING_HANDSHAKES)]
        until(loop, lambda: len(door._unauthenticated) == MAX_PENDING_HANDSHAKES)
        link = stack.enter_context(message_socket.connect(door.name, 20, shm.decode))
        link.send(hello_of(1))
        answer, fds = turn(loop, link)
        for fd in fds:
            os.close(fd)
        assert isinstance(answer, shm.PeerWelcome)
        assert [is_over(sock) for sock in socks] == [True] + [False] * (MAX_PENDING_HANDSHAKES - 1)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", struct.pack("<I", (64 << 10) + 1),
                                  struct.pack("<I", 2) + b"no",
                                  struct.pack("<I", 11) + b"\x81\xa4type\xa4" + b"\xff" * 4,
                                  struct.pack("<I", 30_000) + b"\x81\xa1a" * 10_000])
def test_nonsense_is_refused_at_once(reception, said):
    door, loop = reception
    with stranger(door) as sock:
        sock.send(said)
        until(loop, lambda: is_over(sock))


def test_two_messages_before_an_answer_are_refused(reception):
    door, loop = reception
    with message_socket.connect(door.name, 20, shm.decode) as link:
        for source in (1, 2):
            link.send(hello_of(source))
        answer, _ = turn(loop, link)
        assert isinstance(answer, Refuse) and "2 messages before it was answered" in answer.reason


def test_a_nodes_hello_counts_once(reception):
    door, loop = reception
    with (message_socket.connect(door.name, 20, shm.decode) as link,
          message_socket.connect(door.name, 20, shm.decode) as other):
        link.send(hello_of(1))
        answer, fds = turn(loop, link)
        assert isinstance(answer, shm.PeerWelcome)
        for fd in fds:
            os.close(fd)
        other.send(hello_of(1))
        answer, fds = turn(loop, other)
        assert isinstance(answer, Refuse) and "counts once" in answer.reason and not fds


def test_before_a_node_knows_itself_only_those_with_the_key_wait(early, shm_endpoint):
    door, loop = early
    with (message_socket.connect(door.name, 20, shm.decode) as link,
          message_socket.connect(door.name, 20, shm.decode) as other):
        other.send(hello_of(2, key=bytes(16)))
        answer, _ = turn(loop, other)
        assert isinstance(answer, Refuse) and "has another job key" in answer.reason
        link.send(hello_of(1))
        until(loop, lambda: door._waiting)
        assert len(door._waiting) == 1
        door.set_node(0, Epochs(1), shm_endpoint)
        answer, fds = turn(loop, link)
        assert isinstance(answer, shm.PeerWelcome)
        for fd in fds:
            os.close(fd)


def test_without_free_descriptors_nobody_is_let_in_for_a_while(reception, monkeypatch, caplog):
    door, loop = reception
    monkeypatch.setattr(door_of, "_ACCEPT_RETRY_S", 0.2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with stranger(door) as sock:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            until(loop, lambda: door._is_paused)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "ulimit -n" in caplog.text
        sock.send(b"GET / HTTP/1.1\r\n")
        until(loop, lambda: is_over(sock))


def test_another_users_process_takes_no_place(reception, monkeypatch):
    door, loop = reception
    monkeypatch.setattr(message_socket, "peer_uid", lambda sock: (1, 4711))
    with stranger(door) as sock:
        until(loop, lambda: is_over(sock))
        assert not door._unauthenticated


def test_a_crowd_is_not_logged_one_by_one(reception, caplog):
    door, loop = reception
    caplog.set_level(logging.INFO)
    for _ in range(50):
        with stranger(door) as sock:
            sock.send(b"GET / HTTP/1.1\r\n")
            until(loop, lambda: is_over(sock))
    assert caplog.text.count("refused process") < 10
