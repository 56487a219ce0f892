"""Two nodes over TCP: one to four authenticated connections per pair, handed to native streams.

A node listens before it joins the job, so its address is good as soon as anybody knows it. The dialler opens
its streams one after another; each answers the HMAC challenge of `orchestration.security` in both directions
before it counts, and says which node, which stream and which epoch it is. From then on a native
`bpsfast.pyx.tcp.Stream` owns the connection; a partition always takes the same stream (`TcpLink.lane_of`), so
payload and announcement stay in order.
"""
from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field

from ..orchestration import security
from ..orchestration.errors import ConfigError, MismatchError, StallError
from ..pyx.engine import Engine
from ..pyx.ring import MAX_PARTS
from ..pyx.tcp import Stream
from ..trace.records import Limits
from .pace import Paces

CONTEXT = "bpsfast data"
#: A stranger on the data port holds up one accepting thread for at most this long.
CHALLENGE_TIMEOUT_S = 5.0
#: Send buffers that stay in the cache: bytes go through them once, and late urgent ones wait behind them. Between
#: machines they also have to cover the round trip.
_NEAR_BUFFER_NBYTES = 128 << 10
_FAR_BUFFER_NBYTES = 512 << 10


def listen(host: str) -> socket.socket:
    """Return a socket that listens for data connections on *host*, any port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise ConfigError(f"cannot listen for data on {host!r}: {exc}; set BPSFAST_NODE_HOST to an address of this "
                          "machine") from exc
    return listener


def _is_near(sock: socket.socket) -> bool:
    """Whether the peer is on this host, as its address tells."""
    return sock.family == socket.AF_INET and sock.getsockname()[0] == sock.getpeername()[0]


_UNTRACED = Limits()


@dataclass
class TcpLink:
    """The connections to one peer of a job of *n_nodes*, by stream number; native streams once `start` was called.

    *n_streams*: how many of them partitions take turns on that say nothing else (0: all). *expected*: what `expect` was
    told. *send_buffer_nbytes* 0: what measured best, little enough to stay in the cache.
    """

    index: int
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    n_nodes: int = 1
    epoch: int = 1
    n_slots: int = MAX_PARTS
    send_buffer_nbytes: int = 0
    limits: Limits = _UNTRACED
    paces: Paces | None = None
    n_streams: int = 0
    expected: list[tuple[int, int, int, int, int, bool]] = field(default_factory=list)
    _n_streams_of: dict[int, int] = field(default_factory=dict)  # part -> what it says itself

    kind = "tcp"
    is_wire = True

    def start(self, engine: Engine, source: int) -> None:
        """Hand the connections to native streams, whose arrivals *engine* takes as those of *source*."""
        for number in sorted(self.sockets):
            sock = self.sockets[number]
            nbytes = self.send_buffer_nbytes or (_NEAR_BUFFER_NBYTES if _is_near(sock) else _FAR_BUFFER_NBYTES)
            pace_out, pace_in = (self.paces.out.address, self.paces.incoming.address) if self.paces else (0, 0)
            if self.paces:
                self.paces.prepare(sock)
            stream = Stream(sock.fileno(), peer=source, engine=engine.handle,
                            arrived=engine.arrived_address, notify=engine.notify_address, epoch=self.epoch,
                            n_slots=self.n_slots, send_buffer_nbytes=nbytes,
                            **self.limits._asdict(), pace_out=pace_out, pace_in=pace_in,
                            keep=(engine, self.paces))
            self.streams.append(stream)
            self.sockets.pop(number).detach()  # the stream owns the descriptor from here on
        for each in self.expected:
            self.bind(*each)
        for stream in self.streams:
            stream.start()

    def expect(self, part: int, even: int, odd: int, nbytes: int, n_streams: int = 0, framed: bool = False) -> None:
        """Do what `bind` does, before `start`: the peer may write as soon as it is connected."""
        self.expected.append((part, even, odd, nbytes, n_streams, framed))

    def bind(self, part: int, even: int, odd: int, nbytes: int, n_streams: int = 0, framed: bool = False,
             first_round: int = 1) -> None:
        """Expect *nbytes* of *part* from the peer, at addresses by the round's parity; *framed*: see `WireLink`.

        *first_round* is not looked at: what comes says its round.

        From then on *part* takes one of the first *n_streams* streams, on this side; the peer is told the same.
        """
        if n_streams:
            self._n_streams_of[part] = n_streams
        self.lane_of(part).bind(part, even, odd, nbytes, framed)

    def unbind(self, part: int) -> None:
        """Expect nothing more of *part*: it was refused, or is retired. Writes to it are errors."""
        self.expected = [each for each in self.expected if each[0] != part]
        if self.streams:
            self.lane_of(part).unbind(part)
        self._n_streams_of.pop(part, None)

    def why(self, code: int) -> str:
        """Return in words why a stream was lost; *code* is the event's."""
        return os.strerror(code) if code else "closed"

    def lane_of(self, part: int) -> Stream:
        """Return the stream that *part* takes, the same one in both directions and on both sides.

        Neighbouring parts have different owners: they go to one stream together, so that each stream carries partials
        and results in both directions.
        """
        n = self._n_streams_of.get(part) or self.n_streams or len(self.streams)
        return self.streams[part // self.n_nodes % min(n, len(self.streams))]

    def counters(self) -> dict[str, int]:
        """Return the sum of the streams' counters."""
        total: dict[str, int] = {}
        for stream in self.streams:
            for name, value in stream.counters().items():
                total[name] = total.get(name, 0) + value
        return total

    def traces(self) -> list[bytes]:
        """Return the trace records of each stream."""
        return [stream.trace() for stream in self.streams]

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for stream in self.streams:
            stream.close()
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()


def dial(address: str, key: bytes, *, mine: int, peer: int, n_streams: int, epoch: int, deadline: float) -> TcpLink:
    """Open *n_streams* authenticated connections to node *peer* at *address* ("host:port").

    Raises
    ------
    BpsError
        `StallError` when it could not be reached until *deadline* (monotonic seconds); `MismatchError` for
        another job key or epoch.
    """
    link = TcpLink(peer, epoch=epoch)
    try:
        for number in range(n_streams):
            link.sockets[number] = connect(address, key, mine=mine, peer=peer, number=number, epoch=epoch,
                                           deadline=deadline)
    except BaseException:
        link.close()
        raise
    return link


def connect(address: str, key: bytes, *, mine: int, peer: int, number: int, epoch: int,
            deadline: float) -> socket.socket:
    """Open one authenticated connection, the stream *number*; same errors as `dial`."""
    sock = _reach(address, peer, deadline)
    try:
        hello = security.StreamHello(peer=mine, stream=number, epoch=epoch)
        # The acceptor may still be waiting for its own Welcome: it has until the deadline.
        answer = security.challenge_connect(sock, key, CONTEXT, hello, max(0.1, deadline - time.monotonic()))
        if (answer.peer, answer.epoch) != (peer, epoch):
            raise MismatchError(f"{address} is node {answer.peer} of epoch {answer.epoch}, expected node {peer} of "
                                f"epoch {epoch}")
    except BaseException:
        sock.close()
        raise
    return sock


def accept(sock: socket.socket, key: bytes, *, mine: int, epoch: int) -> security.StreamHello:
    """Challenge a connection that was just accepted and return who it is; raises `BpsError` if it cannot prove it."""
    sock.setblocking(True)
    hello = security.challenge_accept(sock, key, CONTEXT, peer=mine, epoch=epoch, timeout_s=CHALLENGE_TIMEOUT_S)
    if hello.epoch != epoch:
        raise MismatchError(f"node {hello.peer} dialled for epoch {hello.epoch}, this is epoch {epoch}")
    prepare(sock)
    return hello


def prepare(sock: socket.socket) -> None:
    """Set what a data connection needs: headers leave at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _reach(address: str, peer: int, deadline: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    last: Exception | None = None
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((host, int(port)), timeout=remaining)
            sock.setblocking(True)
            prepare(sock)
            return sock
        except OSError as exc:
            last = exc
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
    raise StallError(f"node {peer} could not be reached at {address} ({last}): is a firewall between the machines, or "
                     "does BPSFAST_NODE_HOST there name an address that this machine cannot reach?")


