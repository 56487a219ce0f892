"""How much input a node on few CPUs gets through: a short measurement with the real kernel and the kernel's TCP.

A helper receives every byte that it sums, and sends as many back. So each thread does both: it sums pieces as large as
usual, and passes as many bytes through a connection to itself, which costs what receiving and sending cost together.
With RDMA the card does that.
"""
from __future__ import annotations

import socket
import threading
import time

import numpy as np

from .. import kernels
from ..orchestration.errors import ConfigError

_PIECE_NBYTES = 1 << 20
_N_INPUTS = 2
_SEND_NBYTES = 64 << 10
#: Beyond the caches, as inputs of a model are.
_N_PIECES = 8
_TIMEOUT_S = 5.0


def measure(n_threads: int, duration_s: float = 0.15, by_tcp: bool = True) -> float:
    """Return bytes of input per second that *n_threads* threads sum, with all else that runs here.

    *by_tcp*: they also receive them, and send as many. Takes *duration_s*; longer, up to some seconds, where other
    programs leave nothing over.

    Raises
    ------
    ConfigError
        If the loopback interface does not work.
    """
    kernels.warm(["float32"])
    begin = threading.Barrier(n_threads + 1)
    end = threading.Event()
    counts = [0] * n_threads
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with _Loop(by_tcp) as loop:
                begin.wait(_TIMEOUT_S)
                while not end.is_set():
                    counts[number] += loop.turn()
        except BaseException as exc:
            faults.append(exc)
            begin.abort()

    threads = [threading.Thread(target=work, args=(number,), name="bpsfast-measure", daemon=True)
               for number in range(n_threads)]
    for thread in threads:
        thread.start()
    try:
        begin.wait(_TIMEOUT_S)
        begin_s = time.monotonic()
        took_s = 0.0
        while not faults and (took_s < duration_s or not any(counts)) and took_s < _TIMEOUT_S:
            end.wait(duration_s / 4)
            nbytes, took_s = sum(counts), time.monotonic() - begin_s
    except threading.BrokenBarrierError:
        nbytes = 0
    end.set()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    if faults or not nbytes:
        why = faults[0] if faults else f"nothing was done within {_TIMEOUT_S:g} s: other programs want these CPUs"
        raise ConfigError(f"how fast this node sums could not be measured ({why}); set BPSFAST_SUM_RATE")
    return nbytes / took_s


class _Loop:
    """Pieces to sum, and a connection of one thread to itself. A context manager."""

    def __init__(self, by_tcp: bool) -> None:
        self._by_tcp = by_tcp
        self._inputs = np.ones((_N_INPUTS, _N_PIECES, _PIECE_NBYTES // 4), np.float32)
        self._output = np.zeros((_N_PIECES, _PIECE_NBYTES // 4), np.float32)
        self._next = 0
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._out = socket.create_connection(server.getsockname(), timeout=_TIMEOUT_S)
            while True:
                self._in, peer = server.accept()
                if peer == self._out.getsockname():
                    break
                self._in.close()  # somebody else's
        self._in.settimeout(_TIMEOUT_S)
        self._out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _SEND_NBYTES)

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._out.close()
        self._in.close()

    def turn(self) -> int:
        """Sum one piece and pass its inputs through the connection; return their bytes."""
        piece, self._next = self._next, (self._next + 1) % _N_PIECES
        inputs = [self._inputs[i, piece] for i in range(_N_INPUTS)]
        kernels.fused_sum(self._output[piece], inputs, [], [])
        for each in inputs if self._by_tcp else ():
            view = memoryview(each).cast("B")
            for at in range(0, _PIECE_NBYTES, _SEND_NBYTES):
                part = view[at:at + _SEND_NBYTES]
                self._out.sendall(part)
                left = len(part)
                while left:
                    left -= self._in.recv_into(part[:left])
        return _N_INPUTS * _PIECE_NBYTES
