"""Finds the rates of a node's NIC, of its sums and of its copies, which it reports to the scheduler when it joins."""
from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import threading
import time
from typing import NamedTuple

from .. import kernels
from ..base.settings import Settings
from ..hardware import rdma_route
from ..hardware.host import Host
from ..orchestration.errors import ConfigError
from ..pyx.port import copy

log = logging.getLogger("bpsfast.node")

_BYTES = 1e9 / 8  # of one Gbit
#: Bytes of each copied buffer: those of a partition, which stays in the caches between copies, as after a sum.
_COPY_NBYTES = 4 << 20
_N_COPIES = 3
_MAX_THREADS = 8
#: The measurement of sums: pieces as large as partitions, so many that they do not stay in the caches.
_PIECE_NBYTES = 1 << 20
_N_PIECES = 8
_N_INPUTS = 2
_SEND_NBYTES = 64 << 10
_TIMEOUT_S = 5.0


class NodeCapacity(NamedTuple):
    """Rates in bytes/s; 0: not known, not limited, or fast enough. `probes`: the first is measured with other nodes.

    `copy_rate_bytes`: of all summing threads together.
    """

    nic_rate_bytes: float
    nic_limit_bytes: float
    sum_rate_bytes: float
    probes: bool = False
    copy_rate_bytes: float = 0.0


def of(settings: Settings, address: str) -> NodeCapacity:
    """Return the capacity of this machine, whose peers connect to *address*.

    Sums are measured, for a fraction of a second, where the node has only some CPUs of its machine. Other nodes are
    assumed to sum faster than their NIC delivers: three cores keep up with 100 Gbit/s.
    """
    host = Host()
    by_rdma, ports = 0.0, ""
    if settings.transport in ("auto", "rdma") and not settings.nic_limit:
        by_rdma, ports = rdma_route.rails_gbps(host, address, settings)
    if settings.nic_rate:
        gbps, source = settings.nic_rate, "set"
    else:
        gbps, source = (by_rdma, ports) if by_rdma else rdma_route.interface_gbps(host, address)
    log.info("NIC behind %s: %s (%s)", address, f"{gbps:g} Gbit/s" if gbps else "rate not known", source)
    sum_rate = settings.sum_rate * _BYTES
    if settings.cores and not sum_rate:
        sum_rate = measure_sum_rate(settings.engine_threads or settings.cores, by_tcp=not by_rdma)
        log.info("%d CPUs %s %.3g Gbit/s", settings.cores, "sum" if by_rdma else "receive, sum and send on",
                 sum_rate / _BYTES)
    probes = settings.nic_probe and not gbps and not settings.nic_limit
    return NodeCapacity(gbps * _BYTES, settings.nic_limit * _BYTES, sum_rate, probes,
                    measure_copy_rate(n_summing_threads(settings)))


def n_summing_threads(settings: Settings) -> int:
    """Return how many threads sum on this node."""
    return settings.engine_threads or min(len(os.sched_getaffinity(0)), _MAX_THREADS)


def measure_copy_rate(threads: int) -> float:
    """Measure bytes/s that one thread copies (the best of a few tries, within about 5 ms), times *threads*.

    The choice of compression scales the kernels' measured ratios with it. Threads that share a memory bus copy less
    together, but most of these kernels compute.
    """
    source, target = ctypes.create_string_buffer(_COPY_NBYTES), ctypes.create_string_buffer(_COPY_NBYTES)
    best_s = float("inf")
    for _ in range(_N_COPIES):
        begin = time.perf_counter()
        copy(ctypes.addressof(target), ctypes.addressof(source), _COPY_NBYTES)
        best_s = min(best_s, time.perf_counter() - begin)
    return threads * _COPY_NBYTES / best_s


def measure_sum_rate(n_threads: int, duration_s: float = 0.15, by_tcp: bool = True) -> float:
    """Measure bytes of input per second that *n_threads* threads sum, beside all else that runs here.

    A helper receives every byte that it sums, and sends as many. *by_tcp*: so each thread also passes as many bytes
    through a connection to itself, which costs what receiving and sending cost together; with RDMA the card does that.
    Takes *duration_s*; longer, up to some seconds, if other programs leave no CPU time.

    Raises `ConfigError` if the loopback interface does not work.
    """
    kernels.warm(["float32"])
    begin = threading.Barrier(n_threads + 1)
    end = threading.Event()
    counts = [0] * n_threads
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with contextlib.closing(_Loop(by_tcp)) as loop:
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
    """One thread's work of a helper: pieces to sum, and a connection to itself."""

    def __init__(self, by_tcp: bool) -> None:
        import numpy as np  # most nodes measure no sums, and start without it

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
                self._in.close()  # a connection of another process
        self._in.settimeout(_TIMEOUT_S)
        self._out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _SEND_NBYTES)

    def close(self) -> None:
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
