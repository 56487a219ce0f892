"""The lower bound of a push_pull between two nodes: both only send and receive the same bytes over plain sockets.

Colocated summation of M bytes on two nodes moves M bytes in each direction (half partials, half results), so this
exchange takes as long as a push_pull in which sums, decisions and waiting cost nothing.
"""
from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bpsfast.bench.harness.contestant import Operation

_TIMEOUT_S = 60.0
_CHUNK_NBYTES = 1 << 20
_SMALL_NBYTES = 128 << 10
#: Variant -> its connections. Small send buffers stay in the caches, which is faster if the CPU is the bottleneck.
VARIANTS = {"raw 1": slice(0, 1), "raw 2": slice(0, 2), "raw 2 small": slice(2, 4)}


class RawSockets:
    """One of two ends: rank 1 listens at *host*, *port*, rank 0 connects. Operations: `VARIANTS`."""

    def __init__(self, rank: int, host: str, port: int) -> None:
        self.rank = rank
        self._memory: dict[int, tuple[memoryview, ...]] = {}
        self._sockets = _connect(host, port, 4) if rank == 0 else _accept(host, port, 4)
        for sock in self._sockets[VARIANTS["raw 2 small"]]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL_NBYTES)
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(None)
        self._pool = ThreadPoolExecutor(2 * len(self._sockets))

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return an exchange of *nbytes* in each direction over the variant's connections."""
        sockets = self._sockets[VARIANTS[variant]]
        if nbytes not in self._memory:  # page-aligned and touched, like segments
            self._memory[nbytes] = tuple(memoryview(mmap.mmap(-1, nbytes)) for _ in range(2))
            for memory in self._memory[nbytes]:
                memory[:] = bytes(nbytes)
        outgoing, incoming = self._memory[nbytes]
        share = nbytes // len(sockets)
        tasks: list[tuple[Callable[[socket.socket, memoryview], None], socket.socket, memoryview]] = []
        for i, sock in enumerate(sockets):
            part = slice(i * share, nbytes if i == len(sockets) - 1 else (i + 1) * share)
            tasks += [(_send, sock, outgoing[part]), (_receive, sock, incoming[part])]

        def run() -> None:
            for future in [self._pool.submit(move, sock, memory) for move, sock, memory in tasks]:
                future.result(_TIMEOUT_S)

        return Operation(run=run, fill=lambda known: None, n_wrong=lambda: 0)

    def barrier(self) -> None:
        """Wait for the other end."""
        self._sockets[0].sendall(b"b")
        self._sockets[0].recv(1)

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown()
        for sock in self._sockets:
            sock.close()


def _send(sock: socket.socket, memory: memoryview) -> None:
    for at in range(0, len(memory), _CHUNK_NBYTES):
        sock.sendall(memory[at : at + _CHUNK_NBYTES])


def _receive(sock: socket.socket, memory: memoryview) -> None:
    got = 0
    while got < len(memory):
        nbytes = sock.recv_into(memory[got : got + _CHUNK_NBYTES])
        if not nbytes:
            raise ConnectionError(f"the other end closed after {got} of {len(memory)} bytes")
        got += nbytes


def _accept(host: str, port: int, n_streams: int) -> list[socket.socket]:
    with socket.create_server((host, port)) as server:
        server.settimeout(_TIMEOUT_S)
        return [server.accept()[0] for _ in range(n_streams)]


def _connect(host: str, port: int, n_streams: int) -> list[socket.socket]:
    deadline = time.monotonic() + _TIMEOUT_S
    wait = threading.Event()
    found: list[socket.socket] = []
    while len(found) < n_streams:
        try:
            found.append(socket.create_connection((host, port), timeout=_TIMEOUT_S))
        except ConnectionRefusedError:  # the other end is not listening yet
            if time.monotonic() >= deadline:
                raise
            wait.wait(0.02)
    return found
