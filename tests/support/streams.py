"""Two ends of a connection as native streams, whose engine is only a mailbox, for tests of streams."""
from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from bpsfast.base.addresses import listening_socket
from bpsfast.node.transport import tcp
from bpsfast.orchestration import security
from bpsfast.pyx import ring
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.tcp import IoThreads, Slots, Stream
from tests.support.loopback import LOOPBACK

#: By which the I/O threads of streams work that are given none (fixture `io_backend`).
default_backend = "epoll"
MAGIC = 0x31575042
EPOCH = 5
NBYTES = 1 << 16


def require_backend(name: str) -> None:
    """Skip the test where I/O threads cannot work by *name*."""
    try:
        IoThreads(1, name).close()
    except OSError as exc:
        pytest.skip(f"{name} is missing: {exc}")


@contextlib.contextmanager
def mailbox() -> Iterator[Engine]:
    """Yield an engine that only collects the streams' results and events."""
    board, bell = Segment(ring.BOARD_NBYTES, populate=False), Segment(ring.DOORBELL_NBYTES)
    ring.format_board(board)
    ring.format_doorbell(bell)
    made = Engine(board, bell, n_threads=1)
    yield made
    made.close()


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection over the loopback."""
    with listening_socket(LOOPBACK) as server:
        left = socket.create_connection(server.getsockname()[:2])
        right, _ = server.accept()
    with left, right:
        yield left, right


def stream(engine: Engine, sock: socket.socket, io_threads: IoThreads | None = None, slots: Slots | None = None,
           peer: int | None = None, **options: int) -> Stream:
    """Return a stream over *sock*, which becomes its own; it is not started.

    *io_threads*: its own two by default. *slots*: 64 of its own, which are not bound. *peer*: a new source of *engine*.
    """
    return Stream(sock.detach(), io_threads or IoThreads(2, default_backend),
                  peer=engine.add_wire_peer() if peer is None else peer, engine=engine.handle,
                  arrived=engine.arrived_address, notify=engine.notify_address,
                  slots=slots or Slots(64, epoch=EPOCH), keep=engine, **options)


@contextlib.contextmanager
def bound(engine: Engine, sender: Stream, receiver: Stream, nbytes: int) -> Iterator[np.ndarray]:
    """Start both streams, part 1 of *nbytes* bound at the receiver; yield the bytes of even and of odd rounds."""
    with Segment(2 * nbytes) as slots:
        engine.add_member(1, nbytes=nbytes, n_elements=nbytes, unit_offset=0, kernel=1, local=[0],
                          owner=receiver.peer, partial=(0, 0, 0))
        receiver.slots.bind(1, slots.address, slots.address + nbytes, nbytes)
        sender.start()
        receiver.start()
        yield np.frombuffer(slots, np.uint8, 2 * nbytes).reshape(2, nbytes)
        sender.close()
        receiver.close()


@contextlib.contextmanager
def receiving(engine: Engine, sock: socket.socket, nbytes: int = NBYTES, next_round: int = 1,
              **options: bool) -> Iterator[tuple[Stream, Segment]]:
    """Yield a stream over *sock* that takes *nbytes* in slot 1, from *next_round* on, and the memory of even and of odd
    rounds. The engine knows the part: of what arrives it reports nothing.
    """
    receiver = stream(engine, sock, **options)
    with Segment(2 * nbytes) as slots:
        engine.add_member(1, nbytes=nbytes, n_elements=nbytes, unit_offset=0, kernel=1, local=[0],
                          owner=receiver.peer, partial=(0, 0, 0))
        receiver.slots.bind(1, slots.address, slots.address + nbytes, nbytes, next_round=next_round)
        receiver.start()
        yield receiver, slots
        receiver.close()


def header(slot: int = 1, round: int = 1, epoch: int = EPOCH, flags: int = 0, nbytes: int = NBYTES, magic: int = MAGIC,
           immediate: int | None = None) -> bytes:
    """Return the header of a write, as `pyx/wire.h` draws it."""
    if immediate is None:
        immediate = slot & 0xFFFFF | (round & 15) << 20 | (epoch & 255) << 24
    return struct.pack("<6IQ", magic, immediate, slot, round, epoch, flags, nbytes)


def receive(sock: socket.socket, nbytes: int) -> bytes:
    """Return the next *nbytes* that come over *sock*."""
    sock.settimeout(20)
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        assert piece, f"the connection ended after {len(data)} of {nbytes} bytes"
        data += piece
    return data


def events(engine: Engine, n: int, timeout_s: float = 20) -> list[tuple[int, ...]]:
    """Return the next *n* events of *engine*."""
    found = []
    while len(found) < n:
        batch = engine.events(timeout_s)
        assert batch, f"only {found} of {n} events came in {timeout_s} s"
        found += batch
    return found


def greet(sock: socket.socket, key: bytes, hello: security.StreamHello, peer: int, timeout_s: float) -> socket.socket:
    """Authenticate as *hello* says with node *peer* of this epoch or a later one; return *sock*."""
    tcp.prove_to(sock, key, hello, peer, timeout_s, hello.epoch)
    return sock
