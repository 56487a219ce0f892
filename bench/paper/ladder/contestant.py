"""One variant of `bench ladder` at one end: its queue pairs or sockets and a native loop, for all turns of a model."""
from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import bpsfast.bench.paper.ladder.exchange as exchange
from bpsfast.bench.paper.ladder.control import ANSWER_TIMEOUT_S, Control, Offer
from bpsfast.bench.paper.ladder.device import MAX_SEND, Port
from bpsfast.bench.paper.ladder.exchange import StreamExchange, WriteExchange
from bpsfast.bench.paper.ladder.memory import Area
from bpsfast.bench.paper.ladder.shares import LadderVariant
from bpsfast.hardware.verbs import completions
from bpsfast.launch.namespaces import CpuMeter
from bpsfast.orchestration.errors import PeerLostError
from bpsfast.pyx import verbs
from bpsfast.pyx.pages import Segment

_AWAKE_US = 50  # as in a rail of the transport


@dataclass(frozen=True)
class Side:
    """The memory of one end: it sends from one area, receives in another (or the same), and stages in a third.

    *indices* are its partitions in those areas; *at_peer* the offsets of the same partitions in the peer's areas.
    """

    is_service: bool
    send: Area
    land: Area
    stage: Area
    indices: Sequence[int]
    at_peer: Sequence[int]

    def arrival(self, variant: LadderVariant) -> Area:
        """Return the area that the peer writes into."""
        return self.stage if variant.switches & exchange.COPY else self.land

    def rows(self, variant: LadderVariant, begin: int, rkey: int
             ) -> list[tuple[int, int, int, int, int, int, int, int, int]]:
        """Return the partitions for `WriteExchange.add_end`; the peer's area begins at *begin*."""
        copies = bool(variant.switches & exchange.COPY)
        send, land, stage = (area.addresses(variant.unaligned) for area in (self.send, self.land, self.stage))
        lkey, arrival = (self.stage if copies else self.send).lkey, self.arrival(variant)
        arrivals = arrival.addresses(variant.unaligned)
        return [(send[i], stage[i] if copies else 0, begin + offset, arrivals[i], land[i] if copies else 0,
                 self.send.parts[i].nbytes, lkey, rkey, arrival.rkey) for i, offset in zip(self.indices, self.at_peer)]

    def plain_rows(self) -> list[tuple[int, int, int]]:
        """Return the partitions for `StreamExchange.add_end`."""
        send, land = self.send.addresses(False), self.land.addresses(False)
        return [(send[i], land[i], self.send.parts[i].nbytes) for i in self.indices]


class Turn(NamedTuple):
    """Seconds of each step, CPU seconds of this process, and busy seconds of all CPUs of the machine."""

    samples_s: list[float]
    cpu_s: float
    busy_s: float


class Contestant:
    """Base of both contestants: runs a native loop and meters it."""

    loop: WriteExchange | StreamExchange

    def run(self, n_steps: int) -> Turn:
        """Do *n_steps* steps together with the peer; raises `PeerLostError` with the reason if one fails."""
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        with CpuMeter() as meter:
            try:
                samples_s = self.loop.run(n_steps)
            except OSError as exc:
                raise PeerLostError(f"{exc}{self._failure()}") from exc
        busy_s = meter.busy * (os.cpu_count() or 1) * (time.perf_counter() - begin_s)
        return Turn(samples_s, time.process_time() - cpu_s, busy_s)

    def _failure(self) -> str:
        failure = getattr(self.loop, "failure", None)
        if failure is None:
            return ""
        status, vendor_error, end, kind, part = failure
        return f"; end {end}, {kind} {part}: {completions.explain(status, vendor_error)}"


class Writes(Contestant):
    """A variant over RDMA: one end of the connection to the other host, and both ends of one for the own share.

    *side* is this end's memory for the other host. *own* has the worker's and the service's memory for the share that
    stays on this machine, if it goes through the NIC. An end that *polls* never sleeps.
    """

    loop: WriteExchange

    def __init__(self, port: Port, variant: LadderVariant, side: Side, own: Sequence[Side] = (),
                 polls: bool = False) -> None:
        self._port, self._variant, self._side, self._own = port, variant, side, own
        sides = [side, *own]
        self._queue = port.completions([len(each.indices) for each in sides])
        self._pairs = [port.pair(self._queue, len(each.indices)) for each in sides]
        self._messages = [Segment(exchange.messages_nbytes(len(each.indices)), huge=False) for each in sides]
        self._regions = [verbs.MemoryRegion(port.domain, segment) for segment in self._messages]
        self.loop = WriteExchange(self._queue.handle, switches=variant.switches,
                                  awake_us=None if polls else _AWAKE_US, keep=self._queue)

    def offer(self) -> Offer:
        """Return the data that the other host needs for `connect`."""
        return self._offer(0, self._side)

    def connect(self, peer: Offer) -> None:
        """Connect all queue pairs. The other host has to do the same before a step begins."""
        self._connect(0, self._side, peer)
        if self._own:
            for mine, other in ((1, 2), (2, 1)):
                self._connect(mine, self._own[mine - 1], self._offer(other, self._own[other - 1]))

    def _offer(self, i: int, side: Side) -> Offer:
        area = side.arrival(self._variant)
        return self._port.offer(self._pairs[i], area.begin(self._variant.unaligned), area.rkey)

    def _connect(self, i: int, side: Side, peer: Offer) -> None:
        self._port.connect(self._pairs[i], peer)
        self.loop.add_end(self._pairs[i].handle, side.rows(self._variant, peer.arrival, peer.rkey),
                          is_service=side.is_service, max_send=MAX_SEND, messages=self._regions[i].address,
                          messages_lkey=self._regions[i].lkey)

    def close(self) -> None:
        """Close the queue pairs, then their resources."""
        for pair in self._pairs:
            pair.close()
        self.loop.close()
        for region, segment in zip(self._regions, self._messages):
            region.close()
            segment.close()
        self._queue.close()


class Streams(Contestant):
    """A variant over tcp: connections to the other host, and to this one if the own share goes over the network."""

    loop: StreamExchange

    def __init__(self, side: Side, sockets: Sequence[socket.socket], own: Sequence[Side] = ()) -> None:
        self.loop = StreamExchange()
        ends = [(sock, side, i) for i, sock in enumerate(sockets)]
        if own:
            with socket.create_server(("127.0.0.1", 0)) as server:
                for i in range(len(sockets)):
                    ends.append((socket.create_connection(server.getsockname()), own[0], i))
                    ends.append((server.accept()[0], own[1], i))
        for sock, end, i in ends:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rows = end.plain_rows()[i::len(sockets)]
            if rows:
                self.loop.add_end(sock.fileno(), rows, is_service=end.is_service)
        self._sockets = [sock for sock, _, _ in ends]

    def close(self) -> None:
        """Close the connections."""
        self.loop.close()
        for sock in self._sockets:
            sock.close()


def accept(server: socket.socket, n_streams: int) -> list[socket.socket]:
    """Return the next *n_streams* connections in their order."""
    server.settimeout(ANSWER_TIMEOUT_S)
    return [server.accept()[0] for _ in range(n_streams)]


class LadderEnd:
    """Base of the worker and the service: a connection, a port, and the memory and contestants of the current model."""

    def __init__(self, connection: Control, port: Port) -> None:
        self._control, self._port = connection, port
        self._areas: list[Area] = []
        self._contestants: dict[str, Writes | Streams] = {}

    def close_model(self) -> None:
        """Release the memory and contestants of the current model. Idempotent."""
        for contestant in self._contestants.values():
            contestant.close()
        for area in self._areas:
            area.close()
        self._contestants, self._areas = {}, []
