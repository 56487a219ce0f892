"""Recorded first messages of real members of a job, which tests replay in parts, out of order, or changed.

A recording is a list of pieces in the order in which they were sent; one per handshake.
"""
from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import zmq

from bpsfast.base.message_socket import attach_proof
from bpsfast.node.transport import shm, tcp
from bpsfast.orchestration import messages, security
from bpsfast.orchestration.job.node_losses import FIRST_EPOCH
from bpsfast.orchestration.scheduler_client import SchedulerClient

LIMIT_S = 20.0


def handshake(key: bytes, context: str, peer: int, stream: int) -> list[bytes]:
    """Return the messages of a dialler with *key* to an acceptor with the same key."""
    pieces: list[bytes] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        acceptor = threading.Thread(target=security.plain_handshake_acceptor, args=(theirs, key, context), kwargs={
            "peer": 0, "epoch": FIRST_EPOCH, "timeout_s": LIMIT_S})
        acceptor.start()
        security.plain_handshake_dialer(_Heard(ours, pieces), key, context,
                                   security.StreamHello(peer=peer, stream=stream, epoch=FIRST_EPOCH), LIMIT_S)
        acceptor.join(LIMIT_S)
    [whole] = pieces
    n_hello = 42 + struct.unpack_from("<H", whole, 40)[0]
    return [whole[:8], whole[8:40], whole[40:n_hello], whole[n_hello:]]


class _Heard:
    """A socket that keeps what is sent on it in *pieces*."""

    def __init__(self, sock: socket.socket, pieces: list[bytes]) -> None:
        self._sock, self._pieces = sock, pieces

    def sendall(self, data: bytes) -> None:
        self._pieces.append(data)
        self._sock.sendall(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


def data(key: bytes) -> list[list[bytes]]:
    """Return the messages of nodes on data ports."""
    return [handshake(key, tcp.CONTEXT, peer, stream) for peer in (0, 1) for stream in (0, 1)]


def posts(key: bytes) -> list[list[bytes]]:
    """Return the messages of ranks to endpoints."""
    return [handshake(key, "bpsfast post", peer, stream) for peer in (0, 1) for stream in (0, 1)]


def local(key: bytes) -> list[list[bytes]]:
    """Return the messages of ranks and other nodes on a node's local socket, with valid proofs."""
    pid = os.getpid()
    hello = shm.PeerHello(version=messages.VERSION, source=1, target=0, epoch=FIRST_EPOCH, pid=pid,
                          proof=security.prove(key, *shm._proof_words("hello", 1, 0, FIRST_EPOCH, pid)))
    attach = messages.Attach(version=messages.VERSION, package="", pid=pid, local_rank=0, local_size=2, rank=-1,
                             size=3, proof=attach_proof(key, pid, 0), settings={})
    frames = []
    for message, n_fds in ((hello, 0), (attach, 1), (shm.PeerLane(), 3)):
        body = messages.encode(message)
        frames.append([struct.pack("<I", len(body) | n_fds << 28), body[:20], body[20:]])
    return frames


def control(address: tuple[str, int], key: bytes) -> list[list[bytes]]:
    """Return the messages of a node with *key* to the scheduler at *address*, which refuses its Join."""
    pieces: list[bytes] = []
    with _relayed(address, pieces) as port, _joining(port, key) as node:
        poller = zmq.Poller()
        poller.register(node.sockets[0], zmq.POLLIN)
        deadline = time.monotonic() + LIMIT_S
        while not (answers := node.recv_nowait(time.monotonic())) and time.monotonic() < deadline:
            poller.poll(50)
        assert [type(each) for each in answers] == [messages.Refuse], answers
    return [pieces]


def foreign_control(address: tuple[str, int]) -> list[list[bytes]]:
    """Return the messages of a node with another key there; CURVE rejects its first command."""
    pieces: list[bytes] = []
    with _relayed(address, pieces) as port, _joining(port, bytes(32)):
        deadline = time.monotonic() + LIMIT_S
        while sum(map(len, pieces)) < 64 + 200:  # ZMTP's greeting, and CURVE's HELLO
            assert time.monotonic() < deadline
            time.sleep(0.01)
    return [pieces]


@contextlib.contextmanager
def _joining(port: int, key: bytes) -> Iterator[SchedulerClient]:
    node = SchedulerClient("127.0.0.1", port, key, now=time.monotonic())
    node.send(messages.Join(version=messages.VERSION, package="", host="recorded", pid=1, index=-1, ranks=(),
                            server_processes=0, address="recorded:1", shm_name="", nic_rate_bytes=0.0, settings={}))
    try:
        yield node
    finally:
        node.close(0.0)


@contextlib.contextmanager
def _relayed(address: tuple[str, int], pieces: list[bytes]) -> Iterator[int]:
    """Yield a port whose first connection is forwarded to *address*; *pieces* records the caller's bytes."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        relay = threading.Thread(target=_relay, args=(door, address, pieces))
        relay.start()
        yield door.getsockname()[1]
        relay.join(LIMIT_S)


def _relay(door: socket.socket, address: tuple[str, int], pieces: list[bytes]) -> None:
    """Forward one connection to *address*, and record the caller's bytes."""
    near, _ = door.accept()
    with near, socket.create_connection(address, LIMIT_S) as far:
        back = threading.Thread(target=_pump, args=(far, near, []))
        back.start()
        _pump(near, far, pieces)
        back.join(LIMIT_S)


def _pump(source: socket.socket, sink: socket.socket, pieces: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            pieces.append(piece)
            sink.sendall(piece)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
