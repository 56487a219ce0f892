"""Sharing memory with a node of this host: each descriptor it passes has one owner, also when it is of no use."""
from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from bpsfast.base.message_socket import MessageSocket
from bpsfast.node.transport import Epochs, shm
from bpsfast.orchestration.errors import PeerLostError, ProtocolError
from bpsfast.pyx import ring
from bpsfast.pyx.pages import Segment

KEY = bytes(range(16))
PAGE_NBYTES = 65536


@pytest.fixture
def doorbell(no_leaks):
    with Segment(ring.DOORBELL_NBYTES) as made:
        ring.format_doorbell(made)
        yield made


@pytest.fixture
def shm_endpoint(doorbell):
    with contextlib.closing(shm.ShmEndpoint(doorbell)) as made:
        yield made


@pytest.fixture
def broken_endpoint(no_leaks):
    """What a node offers whose doorbell is a pipe: its lane can be mapped, the next descriptor cannot."""
    reader, writer = os.pipe()
    os.close(writer)
    with open(reader, "rb") as pipe, contextlib.closing(shm.ShmEndpoint(pipe)) as made:
        yield made


@pytest.fixture
def channels(no_leaks):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with MessageSocket(left, shm.decode) as ours, MessageSocket(right, shm.decode) as theirs:
        yield ours, theirs


def assert_refused(attempt: Callable[[], object]) -> None:
    """Fail if *attempt* succeeds, or if anything closes a descriptor once more when its remains are collected."""
    with pytest.raises(ProtocolError, match="node 0 passed a descriptor that cannot be mapped") as caught:
        attempt()
    reused = [os.open(os.devnull, os.O_RDONLY) for _ in range(32)]  # the numbers that are free by now
    del caught
    gc.collect()
    for fd in reused:
        os.close(fd)  # EBADF: somebody else did


def test_the_connector_closes_each_descriptor_once(shm_endpoint, broken_endpoint):
    def accept(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with MessageSocket(sock, shm.decode) as link:
            hello, _ = link.recv(20)
            shm.welcome(KEY, hello, link, 0, Epochs(1), broken_endpoint).close()
            for fd in link.recv(20)[1]:
                os.close(fd)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0bpstest-%d" % os.getpid())
        listener.listen()
        listener.settimeout(20)
        acceptor = threading.Thread(target=accept, args=(listener,))
        acceptor.start()
        assert_refused(lambda: shm.connect(KEY, listener.getsockname(), 1, 0, 1, shm_endpoint, 20))
        acceptor.join(20)
        assert not acceptor.is_alive()


def test_the_acceptor_closes_each_descriptor_once(channels, shm_endpoint, broken_endpoint):
    ours, theirs = channels
    with shm_endpoint.lane() as mine, broken_endpoint.lane() as lane:
        theirs.send(shm.PeerLane(), broken_endpoint.fds(lane))
        fds = list(ours.recv(20)[1])
        assert_refused(lambda: shm.complete(0, ours, mine, fds))
        assert len(fds) == 2 and not mine.closed, "what was not taken is the caller's"
        for fd in fds:
            os.close(fd)


def linked(channels: tuple[MessageSocket, MessageSocket], shm_endpoint: shm.ShmEndpoint) -> shm.ShmLink:
    ours, theirs = channels
    with shm_endpoint.lane() as lane:
        theirs.send(shm.PeerLane(), shm_endpoint.fds(lane))
    return shm.complete(0, ours, shm_endpoint.lane(), list(ours.recv(20)[1]))


def test_a_pair_owns_what_it_was_passed(channels, shm_endpoint):
    link = linked(channels, shm_endpoint)
    assert link.outgoing.nbytes == link.incoming.nbytes >= ring.PEER_LANE_NBYTES
    link.close()  # and nothing is left: `no_leaks`


def test_a_segment_that_cannot_be_mapped_is_closed_once(channels, shm_endpoint):
    link = linked(channels, shm_endpoint)
    reader, writer = os.pipe()
    os.close(writer)
    assert_refused(lambda: link.map(shm.PeerSegment(segment=1, kind="input", nbytes=1), reader))
    link.close()


def test_a_segment_of_another_size_is_closed_once(channels, shm_endpoint):
    link = linked(channels, shm_endpoint)
    with Segment(PAGE_NBYTES) as segment:
        fd = os.dup(segment.fileno())
    with pytest.raises(ProtocolError, match=f"or with {PAGE_NBYTES} bytes instead of {PAGE_NBYTES + 1}"):
        link.map(shm.PeerSegment(segment=1, kind="input", nbytes=PAGE_NBYTES + 1), fd)
    link.close()


def test_the_process_of_a_lost_peer_is_ended_for_certain(channels, shm_endpoint):
    link = linked(channels, shm_endpoint)
    os.close(link.pidfd)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    link.pidfd = os.pidfd_open(child.pid)
    link.end_process(20)
    assert child.wait(20) == -signal.SIGKILL
    link.end_process(20)  # nor is it an error that it is gone
    link.close()


def test_a_process_that_does_not_end_is_an_error(channels, shm_endpoint, monkeypatch):
    link = linked(channels, shm_endpoint)  # its pidfd is our own
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    with pytest.raises(PeerLostError, match=r"node 0 is lost, but its process does not end within 0\.01 s of SIG"):
        link.end_process(0.01)
    link.close()
