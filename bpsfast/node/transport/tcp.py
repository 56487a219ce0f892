"""TCP between two nodes: one to four authenticated connections per pair, handed over to native streams.

A node listens before it joins the job, so its address is valid as soon as others learn it. The dialler opens its
streams one after another; each passes the HMAC handshake of `orchestration.security` in both directions, which also
names node, stream and epoch. From then on a native `bpsfast.pyx.tcp.Stream` owns the connection. Every partition may
come over every stream of the link; the sender takes the one with the least to deliver.
"""
from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ...base.encryption import Encryption, Seals, seals_of
from ...base.settings import Settings, parse_address
from ...base.trace_records import Limits
from ...orchestration import security
from ...orchestration.errors import ConfigError, MismatchError, StallError
from ...orchestration.handshakes import HandshakeAcceptor
from ...orchestration.host_lookup import format_address
from ...orchestration.security import HandshakeResult
from ...pyx.dispatch import Dispatch
from ...pyx.engine import Engine
from ...pyx.pace import Pace
from ...pyx.ring import MAX_PARTS
from ...pyx.tcp import IoThreads, Slots, Stream
from .links import WireLink

log = logging.getLogger("bpsfast.node")

CONTEXT = "bpsfast data"
#: How long a connection to the data port may take to authenticate.
CHALLENGE_TIMEOUT_S = 5.0
#: A send buffer small enough for the cache. Between machines it has to cover the round trip, which the kernel knows:
#: there only what has not left is limited, because urgent bytes wait behind it.
_LOCAL_BUFFER_NBYTES = 128 << 10
_REMOTE_UNSENT_NBYTES = 256 << 10
#: socket.SO_BUF_LOCK, which Python does not name, and the send buffer where the kernel does not know it.
_SO_BUF_LOCK = 72
_FIXED_BUFFER_NBYTES = 4 << 20
#: The least and the most I/O threads by default: with two, streams to a peer on this host took a third longer; one
#: moves tens of Gbit/s.
_IO_THREADS = 4, 8
#: The longest intervals that Linux allows (MAX_TCP_KEEPIDLE, MAX_TCP_KEEPINTVL).
_MOST_KEEPALIVE_S = 32_767
#: The share of a link's bytes that is payload: without headers of Ethernet, IP and TCP (1448 of 1514) and without
#: acknowledgements of the other direction (one for every second packet).
PAYLOAD_SHARE = 0.93
#: How long a link may fill the receive buffers of all connections together before a receiver has its turn.
_SLACK_S = 0.004
_LEAST_BUFFER_NBYTES = 64 << 10
#: socket.SO_MAX_PACING_RATE, which Python does not name; bytes/s, 32 bits.
_SO_MAX_PACING_RATE = 47
_MOST_PACING_RATE = (1 << 32) - 2


class Epochs:
    """The epochs of the job that one node knows, beginning with *epoch*; they decide which connections it accepts.

    Each loss of a node, and each node that joins, begins an epoch. A dialler sends the newest epoch that it knows. A
    node that was dropped learns of no further epoch, so nodes that have committed the next one refuse it.

    Other nodes learn of an epoch at different times, but none commits it before all of them have stopped for it. So a
    connection with an epoch before the last commit is old, or was made a moment too early and is tried again. A joining
    node learns only of changes in which it takes part; until then the epoch that was committed when it was announced is
    enough. Any thread.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._lock = threading.Lock()
        self._known = self._committed = epoch
        self._newcomers: dict[int, int] = {}  # node index -> what was committed when it was announced
        self._taken_in: set[int] = set()

    @property
    def known(self) -> int:
        """The newest epoch, committed or not: what this node sends when it dials."""
        with self._lock:
            return self._known

    def begin(self, epoch: int) -> None:
        """Begin with *epoch*, the last one that the job has committed when this node is admitted."""
        with self._lock:
            self._known = self._committed = epoch

    def expect(self, index: int) -> None:
        """Note that node *index* joins the running job."""
        with self._lock:
            self._newcomers[index] = self._committed

    def freeze(self, epoch: int, joined: Collection[int]) -> None:
        """Note *epoch*, for which this node has stopped; the nodes *joined* learn of it, too."""
        with self._lock:
            self._known = max(self._known, epoch)
            self._taken_in.update(joined)

    def commit(self) -> None:
        """Note that the job goes on in the newest epoch: earlier ones are refused from now on."""
        with self._lock:
            self._committed = self._known
            for index in self._taken_in:
                self._newcomers.pop(index, None)
            self._taken_in.clear()

    def least_of(self, index: int) -> int:
        """Return the lowest epoch that node *index* has to know."""
        with self._lock:
            return self._newcomers.get(index, self._committed)


def _is_local(sock: socket.socket) -> bool:
    """Whether the peer's address is one of this host; False if the connection has ended meanwhile."""
    try:
        return sock.family != socket.AF_UNIX and sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:
        return False


def _let_kernel_choose(sock: socket.socket) -> int:
    """Let the kernel choose the size of the send buffer again, which the NIC's probe has set.

    Returns 0, or the size to set: kernels before 5.14 cannot undo it.
    """
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
    except OSError:
        return _FIXED_BUFFER_NBYTES
    return 0


_UNTRACED = Limits()


@dataclass
class TcpLink(WireLink):
    """The connections to one peer of a job of *n_nodes*, by stream number; native streams once `start` was called.

    *slots*: where the peer writes, once started. *n_streams*: how many streams partitions are sent over by default
    (0: all). *io_threads*: what moves their bytes (None: two threads of their own). *send_buffer_nbytes* 0: the size
    that measured best. *number*: which of the pair's links this is; *awaited_there*: what the peer has not received
    over earlier ones. *seals*: keys of encrypted connections. *checks*: writes over the other connections have
    checksums. *epoch*: that of the dialler.
    """

    index: int
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    seals: dict[int, Seals] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    slots: Slots | None = None
    n_nodes: int = 1
    epoch: int = 1
    n_slots: int = MAX_PARTS
    send_buffer_nbytes: int = 0
    limits: Limits = _UNTRACED
    io_threads: IoThreads | None = None
    paces: TcpPacing | None = None
    checks: bool = False
    n_streams: int = 0
    bound: dict[int, tuple[int, int, int, int, bool]] = field(default_factory=dict)
    number: int = 0
    awaited_there: Mapping[int, int] = field(default_factory=dict)
    fenced: bool = False
    _rounds: dict[int, int] = field(default_factory=dict)  # next round of bound parts, while no slot knows it
    _n_streams_of: dict[int, int] = field(default_factory=dict)  # part -> its own number of streams

    is_encrypted: bool = False

    kind = "tcp"

    def take(self, number: int, sock: socket.socket, seals: Seals | None) -> None:
        """Add *sock* as stream *number*, encrypted with *seals* if given."""
        self.sockets[number] = sock
        if seals is not None:
            self.seals[number] = seals
            self.is_encrypted = True

    def start(self, engine: Engine, source: int, link_number: int = 0) -> None:
        io_threads = self.io_threads or IoThreads(2)
        slots = Slots(self.n_slots, epoch=self.epoch)
        for part, (even, odd, nbytes, _, framed) in self.bound.items():
            slots.bind(part, even, odd, nbytes, framed, self._rounds[part])
        self.slots = slots
        for number in sorted(self.sockets):
            sock = self.sockets[number]
            nbytes = self.send_buffer_nbytes or (_LOCAL_BUFFER_NBYTES if _is_local(sock) else _let_kernel_choose(sock))
            pace_out, pace_in = (self.paces.out.address, self.paces.incoming.address) if self.paces else (0, 0)
            seals = self.seals.pop(number, None)
            seal_out, seal_in = (seals.out.address, seals.incoming.address) if seals else (0, 0)
            if self.paces:
                self.paces.prepare(sock)
            stream = Stream(sock.fileno(), io_threads, peer=source, engine=engine.handle,
                            arrived=engine.arrived_address, notify=engine.notify_address, slots=slots,
                            send_buffer_nbytes=nbytes,
                            unsent_nbytes=0 if nbytes else _REMOTE_UNSENT_NBYTES,
                            **self.limits._asdict(), pace_out=pace_out, pace_in=pace_in,
                            seal_out=seal_out, seal_in=seal_in, checks=self.checks, number=link_number,
                            keep=(engine, self.paces, seals))
            self.streams.append(stream)
            self.sockets.pop(number).detach()  # the stream owns the descriptor from here on
        for stream in self.streams:
            stream.start()

    def expect(self, part: int, even: int, odd: int, nbytes: int, n_streams: int = 0, framed: bool = False,
               next_round: int = 1) -> None:
        """Do as `bind`, before `start`: the peer may write *next_round* as soon as it is connected."""
        self.bound[part] = even, odd, nbytes, n_streams, framed
        self._rounds[part] = next_round
        if n_streams:
            self._n_streams_of[part] = n_streams

    def bind(self, part: int, even: int, odd: int, nbytes: int, n_streams: int = 0, framed: bool = False,
             first_round: int = 1) -> None:
        self.expect(part, even, odd, nbytes, n_streams, framed, first_round)
        if self.slots is not None and not self.fenced:
            self.slots.bind(part, even, odd, nbytes, framed, first_round)

    def unbind(self, part: int) -> None:
        self.bound.pop(part, None)
        self._rounds.pop(part, None)
        if self.slots is not None and not self.fenced:
            self.slots.unbind(part)
        self._n_streams_of.pop(part, None)

    def fence(self) -> None:
        if not self.fenced:
            self._close_streams()
            if self.slots is not None:
                self._rounds = {part: self.slots.next_round(part) for part in self.bound}
            self.fenced = True

    @property
    def is_cut_off(self) -> bool:
        return self.fenced

    def next_round(self, part: int) -> int:
        if self.fenced or self.slots is None:
            return self._rounds.get(part, 1)
        return self.slots.next_round(part)

    def why(self, code: int) -> str:
        if code == errno.EBADMSG:
            return ("data arrived damaged: it was changed in the peer's memory, by a card, in the network or by an "
                    "attacker")
        return os.strerror(code) if code else "closed"

    def route(self, dispatch: Dispatch, source: int) -> None:
        dispatch.route(source, self.streams, n_nodes=self.n_nodes, n_turns=self.n_streams, counts=self._n_streams_of)

    def close(self) -> None:
        self._close_streams()
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()

    def _close_streams(self) -> None:
        for stream in self.streams:
            stream.close()


def dial(address: str, key: bytes, *, mine: int, peer: int, n_streams: int, epochs: Epochs, deadline: float,
         encryption: Encryption = Encryption.NONE) -> TcpLink:
    """Open *n_streams* authenticated connections to node *peer* at *address* ("host:port").

    Raises `BpsError`: `StallError` if it cannot be reached until *deadline* (monotonic seconds); `MismatchError` for
    another job key, or an epoch that is over.
    """
    epoch = epochs.known
    link = TcpLink(peer, epoch=epoch)
    try:
        for number in range(n_streams):
            sock = _reach(address, peer, deadline)
            hello = security.StreamHello(peer=mine, stream=number, epoch=link.epoch, encrypted=encryption.covers(sock))
            secret = prove_to(sock, key, hello, peer, max(0.1, deadline - time.monotonic()), epochs.least_of(peer))
            link.take(number, sock, seals_of(secret, dialled=True) if hello.encrypted else None)
    except BaseException:
        link.close()
        raise
    return link


def connect(address: str, key: bytes, *, mine: int, peer: int, number: int, epochs: Epochs, deadline: float,
            pid: int = 0, link: int = 0, encryption: Encryption = Encryption.NONE) -> tuple[socket.socket, int]:
    """Open one authenticated connection with the stream *number*; return it, and the epoch of its handshake.

    Same errors as `dial`. *pid*, *link*: see `StreamHello`. Both ends must agree on *encryption*, but this connection
    carries nothing that needs it.
    """
    sock = _reach(address, peer, deadline)
    hello = security.StreamHello(peer=mine, stream=number, epoch=epochs.known, pid=pid, link=link,
                                 encrypted=encryption.covers(sock))
    # The acceptor may still be waiting for its own Welcome: it has until the deadline.
    prove_to(sock, key, hello, peer, max(0.1, deadline - time.monotonic()), epochs.least_of(peer))
    return sock, hello.epoch


def prove_to(sock: socket.socket, key: bytes, hello: security.StreamHello, peer: int, timeout_s: float,
             least_epoch: int) -> bytes:
    """Authenticate with node *peer* at the other end of *sock*, both ways; return the shared secret.

    The peer has to know *least_epoch* or a later one.

    Raises `BpsError`: `MismatchError` for another job key, node or `encrypted`, or an epoch that is over; `StallError`
    after *timeout_s*. *sock* is closed then.
    """
    try:
        answer, secret = security.handshake_as_dialer(sock, key, CONTEXT, hello, timeout_s)
        if answer.peer != peer or answer.epoch < least_epoch:
            host, port = sock.getpeername()[:2]
            raise MismatchError(f"{format_address(host, port)} is node {answer.peer} of epoch {answer.epoch}, expected "
                                f"node {peer} of epoch {least_epoch} or later")
    except BaseException:
        sock.close()
        raise
    return secret


def accept(sock: socket.socket, key: bytes, *, mine: int, epochs: Epochs,
           encryption: Encryption = Encryption.NONE) -> security.HandshakeResult:
    """Authenticate a connection that was just accepted; return the result, or raise `BpsError`."""
    sock.setblocking(True)
    greeted = security.handshake_as_acceptor(
        sock, key, CONTEXT, peer=mine, epoch=epochs.known, timeout_s=CHALLENGE_TIMEOUT_S,
        encrypted=encryption.covers(sock))
    hello, least = greeted.hello, epochs.least_of(greeted.hello.peer)
    if hello.epoch < least:
        raise MismatchError(f"node {hello.peer} dialled for epoch {hello.epoch}, the job goes on in epoch {least}: the "
                            "job has dropped that node, or it will try again")
    prepare(sock)
    return greeted


def prepare(sock: socket.socket) -> None:
    """Set the socket options of a data connection: headers are sent at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def end_when_silent(sock: socket.socket, lease_s: float) -> None:
    """Let the kernel end *sock* once its peer has acknowledged nothing for half of *lease_s*; idle ones are probed.

    By default a connection that the other machine has forgotten lives for a quarter of an hour, or forever if nothing
    is sent. The other half of the lease remains to connect again. A peer that acknowledges but reads nothing that long
    (a zero window) is ended in the same way, at the cost of a new connection.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(500 * lease_s)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(max(1, round(lease_s / 4)), _MOST_KEEPALIVE_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, min(max(1, round(lease_s / 8)), _MOST_KEEPALIVE_S))


def reach_once(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to *address* ("host:port"), tried once; `OSError` if there is none within *timeout_s*."""
    sock = socket.create_connection(parse_address(address, "a node"), timeout=timeout_s)
    sock.setblocking(True)
    prepare(sock)
    return sock


def _reach(address: str, peer: int, deadline: float) -> socket.socket:
    last: Exception | None = None
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            return reach_once(address, remaining)
        except OSError as exc:
            last = exc
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
    raise StallError(f"node {peer} could not be reached at {address} ({last}): is a firewall between the machines, or "
                     "does BPSFAST_NODE_HOST there name an address that this machine cannot reach?")


def receive(sock: socket.socket, nbytes: int) -> bytes:
    """Receive *nbytes*; ConnectionResetError if the peer ends the connection before."""
    data = bytearray()
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise ConnectionResetError("the peer has closed the connection")
        data += piece
    return bytes(data)


class TcpPacing:
    """The rate limit that all tcp connections of a node share, one for each direction (setting nic_limit).

    A sending thread waits for its turn before each piece, and so does a receiving thread; its socket then holds little,
    so the peer's kernel soon waits as well. RDMA has no such limit. Must outlive the *n_connections* streams.

    *rate_bytes*: bytes per second on the wire, headers included.
    """

    def __init__(self, rate_bytes: float, n_connections: int) -> None:
        self.out = Pace(rate_bytes * PAYLOAD_SHARE)
        self.incoming = Pace(rate_bytes * PAYLOAD_SHARE)
        self._rate_bytes = rate_bytes
        self._buffer_nbytes = max(_LEAST_BUFFER_NBYTES, int(rate_bytes * _SLACK_S / max(1, n_connections)))

    def prepare(self, sock: socket.socket) -> None:
        """Give *sock* a small receive buffer, and send evenly where the kernel supports that."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_nbytes)
        if self._rate_bytes < _MOST_PACING_RATE:
            with contextlib.suppress(OSError):  # it only smooths: the total is kept without it
                sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(self._rate_bytes))


def io_threads_of(settings: Settings) -> IoThreads:
    """Return the threads that move the bytes of all tcp connections of a node.

    Raises `ConfigError` if they cannot be made: io_uring is missing, or a limit is reached.
    """
    least, most = _IO_THREADS
    n_threads = settings.io_threads or min(most, max(least, len(os.sched_getaffinity(0)) // 2))
    try:
        return IoThreads(n_threads, settings.io_backend)
    except OSError as exc:
        hint = "raise the limits of processes and open files (ulimit -u, ulimit -n)"
        if settings.io_backend == "io_uring":
            hint = ("io_uring needs Linux 6.1 and must be allowed (sysctl kernel.io_uring_disabled, seccomp): use "
                    "BPSFAST_IO_BACKEND=epoll")
        raise ConfigError(f"{n_threads} I/O threads cannot be started: {exc}; {hint}") from exc


def pacing_of(settings: Settings, n_peers: int) -> TcpPacing | None:
    """Return the rate limit of a node with *n_peers* peers, None if there is none."""
    if not settings.nic_limit:
        return None
    return TcpPacing(settings.nic_limit * 1e9 / 8, n_peers * settings.tcp_streams)


class DataPort(HandshakeAcceptor[HandshakeResult]):
    """Accepts data connections of other nodes on *listener*, which it closes, from `start` until `close`.

    Each connection has a thread and a few seconds to prove the job's key.

    *mine*, *epochs*: this node's index, and the epochs that diallers have to know. *on_connection*: called with
    (socket, greeted), in a thread of its own, once a connection is authenticated; it owns the socket. *n_expected*:
    connections that the job itself may open at the same time. *encryption*: which of this job's connections are
    encrypted.
    """

    def __init__(self, listener: socket.socket, key: bytes, mine: int, epochs: Epochs,
                 on_connection: Callable[[socket.socket, HandshakeResult], None], n_expected: int,
                 encryption: Encryption = Encryption.NONE) -> None:
        super().__init__(
            listener, lambda sock: accept(sock, key, mine=mine, epochs=epochs, encryption=encryption), on_connection,
            self._log_refusal, lambda words: log.warning("data port: %s", words), n_expected, "bpsfast-data-port")
        self._refusals = itertools.count(1)

    def _log_refusal(self, why: Exception) -> None:
        number = next(self._refusals)
        if number <= 8 or number & (number - 1) == 0:  # a flood would fill the disk
            log.log(logging.DEBUG if self.is_closed else logging.WARNING, "refused a data connection: %s%s", why,
                    f" ({number} so far)" if number > 8 else "")
