"""A communication service with real streams, whose other ends belong to the test."""
from __future__ import annotations

import queue
import socket
import struct
import time

import pytest

from bpsfast.node.dispatch import Dispatcher
from bpsfast.node.transport.tcp import TcpLink
from bpsfast.pyx import ring
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.pages import Segment
from bpsfast.trace import Limits

HEADER = struct.Struct("<IIIIIIQ")  # wire.h
NBYTES = 70_000  # too much to be sent at once by who posts it: each write is delivered when it was read


def alone(n_parts: int) -> dict[int, int]:
    """Return units of one part each."""
    return {part: part for part in range(n_parts)}


class Service:
    """A dispatcher with real streams; the other ends are plain sockets that read the writes."""

    def __init__(self, n_peers: int, credit_nbytes: int, with_ranks: list[bool], fifo: bool = False) -> None:
        self.board = Segment(ring.BOARD_NBYTES, huge=False, populate=False)
        self.bell = Segment(ring.DOORBELL_NBYTES, huge=False)
        ring.format_board(self.board)
        ring.format_doorbell(self.bell)
        self.payload = Segment(1 << 17, huge=False)
        self.engine = Engine(self.board, self.bell, n_threads=1)
        self.lost: queue.Queue[tuple[int, int]] = queue.Queue()
        self.dispatcher = Dispatcher(self.engine, credit_nbytes, lambda source, code: self.lost.put((source, code)),
                                     Limits(100), fifo=fifo)
        self.readers = tuple(index for index in range(n_peers) if with_ranks[index])
        self.links: list[TcpLink] = []
        self.far: list[socket.socket] = []
        for index in range(n_peers):
            near, far = socket.socketpair()
            far.settimeout(20)
            link = TcpLink(index, {0: near}, n_slots=64)
            source = self.engine.add_wire_peer()
            assert source == index
            self.dispatcher.add(source, link)
            link.start(self.engine, source)
            self.links.append(link)
            self.far.append(far)

    def commit(self, order: tuple[int, ...], first_parts: dict[int, int] | None = None) -> None:
        """Commit parts that all peers with ranks read; each is a separate unit unless *first_parts* has other units."""
        readers = {part: self.readers for part in range(len(order))}
        self.dispatcher.commit(order, first_parts or alone(len(order)), {}, readers)

    def report(self, events: list[tuple[int, ...]]) -> None:
        """Report *events* as the engine and the streams do."""
        self.dispatcher._native.report(events)

    def event(self, kind: int, source: int, part: int, round_: int = 1, nbytes: int = NBYTES) -> tuple[int, ...]:
        return kind, source, part, round_, 0, self.payload.address, nbytes

    def written(self, peer: int, n_writes: int) -> list[int]:
        """Read *n_writes* whole writes that reached *peer*; return their parts."""
        parts = []
        for _ in range(n_writes):
            header = HEADER.unpack(self._exactly(peer, HEADER.size))
            self._exactly(peer, header[-1])
            parts.append(header[2])
        return parts

    def sent(self, link: TcpLink, n_writes: int) -> int:
        """Wait until *link* has counted *n_writes* as sent or the count stops growing; return the count.

        A write that was read here may not be counted there yet.
        """
        deadline = time.monotonic() + 20
        while (n_sent := link.counters()["writes_sent"]) < n_writes and time.monotonic() < deadline:
            pass
        return n_sent

    def until_delivered(self) -> None:
        """Wait until nothing is under way: what was read here is delivered once its stream has asked the kernel."""
        deadline = time.monotonic() + 20
        while self.dispatcher.counters()["in_flight_nbytes"]:
            assert time.monotonic() < deadline, self.dispatcher.counters()

    def _exactly(self, peer: int, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = self.far[peer].recv(nbytes - len(data))
            assert piece
            data += piece
        return data

    def close(self) -> None:
        self.dispatcher.stop()
        for link in self.links:
            link.close()
        for sock in self.far:
            sock.close()
        self.engine.close()
        self.links.clear()
        self.dispatcher = self.engine = None
        for segment in (self.payload, self.board, self.bell):
            segment.close()


@pytest.fixture
def service(request):
    made = Service(*request.param)
    yield made
    made.close()
