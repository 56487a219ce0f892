"""The data port is open for the life of a job, whoever comes: strangers, floods of them, and no descriptors left."""
from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
import time

import pytest

from bpsfast.base.addresses import listening_socket
from bpsfast.node.transport import Epochs, tcp
from bpsfast.node.transport.tcp import DataPort
from bpsfast.orchestration.errors import PeerLostError
from bpsfast.orchestration.handshakes import MAX_PENDING_HANDSHAKES
from bpsfast.orchestration.security import StreamHello
from tests.support.streams import greet

KEY = bytes(range(16))
HELLO = StreamHello(peer=1, stream=2, epoch=7, link=3)


class Port:
    """A data port of node 0, and what came to it."""

    def __init__(self) -> None:
        self.came: queue.Queue[tuple[socket.socket, StreamHello]] = queue.Queue()
        listener = listening_socket("127.0.0.1")
        self.address = listener.getsockname()
        self._sockets: list[socket.socket] = []
        self._port = DataPort(listener, KEY, 0, Epochs(7),
                              lambda sock, greeted: self.came.put((sock, greeted.hello)), 0)
        self._port.start()

    def stranger(self) -> socket.socket:
        """Connect, and say nothing."""
        sock = socket.create_connection(self.address, timeout=20)
        self._sockets.append(sock)
        return sock

    def comes_in(self, timeout_s: float = 20.0) -> bool:
        """Whether a node of the job is let in."""
        sock = greet(self.stranger(), KEY, HELLO, 0, timeout_s)
        theirs, hello = self.came.get(timeout=20)
        with theirs:
            sock.close()
        return hello == HELLO

    def close(self) -> None:
        self._port.close()
        self._port.close()
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def port(no_leaks):
    made = Port()
    yield made
    made.close()


def is_over(sock: socket.socket) -> bool:
    """Whether the other side ends *sock*, in good order."""
    while sock.recv(100):
        pass
    return True


def test_nodes_come_in_one_after_another(port):
    assert all(port.comes_in() for _ in range(3))


def test_a_stranger_is_refused_in_good_order_and_the_next_node_comes_in(port, caplog):
    stranger = port.stranger()
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    assert is_over(stranger) and port.comes_in()
    assert [record.message for record in caplog.records if "refused a data connection: 127.0.0.1:" in record.message]


def test_who_says_nothing_has_a_deadline(monkeypatch, port, caplog):
    monkeypatch.setattr(tcp, "CHALLENGE_TIMEOUT_S", 0.1)
    assert is_over(port.stranger())
    assert "did not finish the handshake of a data connection within 0.1 s" in caplog.text


def test_many_who_say_nothing_keep_no_node_out(port):
    strangers = [port.stranger() for _ in range(MAX_PENDING_HANDSHAKES + 40)]  # all within the deadline of the first
    assert port.comes_in()
    assert is_over(strangers[0])


def test_another_key_or_epoch_is_refused(port):
    with pytest.raises(PeerLostError, match="wrong job key"):
        greet(port.stranger(), b"another key 1234", HELLO, 0, 20)
    late = StreamHello(peer=1, stream=0, epoch=6)
    assert is_over(greet(port.stranger(), KEY, late, 0, 20)) and port.came.empty()
    with pytest.raises(tcp.MismatchError, match="is node 0 of epoch 7, expected node 0 of epoch 8 or later"):
        greet(port.stranger(), KEY, StreamHello(peer=1, stream=0, epoch=8), 0, 20)
    theirs, hello = port.came.get(timeout=20)  # this side may be the one that is still to hear of the epoch
    theirs.close()
    assert hello.epoch == 8 and port.comes_in()


def test_who_would_encrypt_is_refused_where_nobody_does(port, caplog):
    encrypts = StreamHello(peer=1, stream=0, epoch=7, encrypted=True)
    with pytest.raises(tcp.MismatchError, match=r"wants a data connection in the clear, this side .* encrypted"):
        greet(port.stranger(), KEY, encrypts, 0, 20)
    assert port.comes_in() and port.came.empty()


def test_without_descriptors_it_waits_and_says_so_once(port, caplog):
    assert port.comes_in()
    waiting, mine = port.stranger(), port.stranger()
    for sock in (waiting, mine):
        sock.recv(1)  # both are accepted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    late = socket.socket()
    with contextlib.ExitStack() as stack:
        stack.callback(late.close)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        try:
            late.connect(port.address)
            deadline = time.monotonic() + 20
            while "cannot be accepted" not in caplog.text and time.monotonic() < deadline:
                pass
        finally:
            for fd in taken:
                os.close(fd)
    assert port.comes_in()
    assert caplog.text.count("data port: connections wait, because they cannot be accepted: [Errno 24]") == 1


def test_a_flood_of_refusals_does_not_fill_the_log(port, caplog):
    for _ in range(20):
        stranger = port.stranger()
        stranger.sendall(bytes(8))
        assert is_over(stranger)
    said = [record.message for record in caplog.records if "refused a data connection" in record.message]
    assert len(said) == 9 and said[-1].endswith("(16 so far)")


def test_its_end_ends_who_is_at_the_door(no_leaks):
    made = Port()
    stranger = made.stranger()
    stranger.recv(1)  # it was accepted
    begin = time.monotonic()
    made.close()
    assert time.monotonic() - begin < tcp.CHALLENGE_TIMEOUT_S / 2
