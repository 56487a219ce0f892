"""Messages between the ranks of one group over ZeroMQ: rank 0, the leader, listens, the others connect.

The messages here are those about turns (`turns`); other groups have their own (`negotiation`, `elastic.protocol`).
Encrypted by CURVE, with keys derived from a key of this group alone (`security.curve_pair`): a client without it gets
no byte back. The ranks get the key through the group itself, so the channel is no safer than that.
"""
from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import zmq

from ..errors import DECODE_ERRORS, ConfigError, PeerLostError, ProtocolError
from ..handshakes import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES
from ..host_lookup import format_address
from ..security import curve_pair
from ..zmq_connections import ZmqHandshakeLimiter, interface, monitor_event
from .turns import Entry

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_LINGER_MS = 1000
#: The longest message.
_MESSAGE_MAX_NBYTES = 16 << 20


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A follower has connected."""

    rank: int


class Turns(msgspec.Struct, tag=True, frozen=True):
    """The leader tells which operations begin next, in this order."""

    entries: tuple[Entry, ...]


class Begun(msgspec.Struct, tag=True, frozen=True):
    """A follower has begun *count* operations in all."""

    rank: int
    count: int


class Given(msgspec.Struct, tag=True, frozen=True):
    """A follower has been given these (name, part). Only in groups whose turns wait for all."""

    rank: int
    keys: tuple[tuple[str, int], ...]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A rank tells that nothing more is begun. `error`: the name of a class of `errors`; the leader passes it on."""

    error: str
    reason: str


class Left(msgspec.Struct, tag=True, frozen=True):
    """The rank is done, and closes. The leader repeats it until all have left, and so notices lost ranks."""

    rank: int


Message = Hello | Turns | Begun | Given | Failed | Left
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"what a rank said on the line of its group is no message ({exc}): install one version of "
                            "bpsfast everywhere") from exc


class _Channel:
    """What both ends have in common. `_monitor`: the events of the connections of `_socket`."""

    _monitor: zmq.Socket[bytes]

    def __init__(self, kind: int, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._wrong: ProtocolError | None = None  # what `_messages` has yet to raise
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.linger = _LINGER_MS  # before bind, see `Scheduler`
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.ipv6 = True
        # A firewall forgets idle connections, and a host that is lost says nothing: without probes the next message is
        # sent in vain for a quarter of an hour.
        self._socket.tcp_keepalive = 1
        self._socket.tcp_keepalive_idle = KEEPALIVE_IDLE_S
        self._socket.tcp_keepalive_intvl = KEEPALIVE_INTERVAL_S
        self._socket.tcp_keepalive_cnt = KEEPALIVE_PROBES

    def wait(self, wake_fd: int | None, timeout_s: float) -> None:
        """Sleep until there is input, *wake_fd* is readable, or the time is over."""
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, wake_fd):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        poller.poll(0 if self._wrong is not None else int(timeout_s * 1000))

    def _messages(self, receive: Callable[[], Any]) -> list[Any]:
        """Return all messages that have arrived. Raises `ProtocolError` once what came before it was returned."""
        if self._wrong is not None:
            wrong, self._wrong = self._wrong, None
            raise wrong
        received: list[Any] = []
        while True:
            try:
                received.append(receive())
            except zmq.Again:
                return received
            except ProtocolError as exc:
                if not received:
                    raise
                self._wrong = exc
                return received


class LeaderChannel(_Channel):
    """The leader's end, at *host* alone if that is an address of this machine. Owner thread only.

    Only `wait` and `close` block. *decoder*: of the messages of the followers, `Hello` among them. *ports*: the first
    and the last one of those it may listen at; 0: any. *n_followers*: how many may connect at the same time. Raises
    `ConfigError` if there is no free port.
    """

    def __init__(self, key: bytes, host: str = "", decoder: msgspec.msgpack.Decoder[Any] = _decoder,
                 ports: tuple[int, int] = (0, 0), n_followers: int = 0) -> None:
        super().__init__(zmq.ROUTER, decoder)
        self._names: dict[int, bytes] = {}
        self._handshake_limiter = ZmqHandshakeLimiter(self._socket, n_followers)
        self._monitor = self._handshake_limiter.monitor
        self._socket.maxmsgsize = _MESSAGE_MAX_NBYTES
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = curve_pair(key, "scheduler")
        self._socket.router_mandatory = True  # report sends to closed connections
        try:
            self._bind(f"tcp://{interface(host)}", *ports)
        except zmq.ZMQError as exc:
            self.close()
            within = f" within {ports[0]} to {ports[1]} (BPSFAST_PORTS)" if ports[1] else ""
            raise ConfigError(f"no port to listen on for the other ranks{within}: {exc}") from exc
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def _bind(self, address: str, first: int, last: int) -> None:
        for port in range(first, last + 1):
            try:
                self._socket.bind(f"{address}:{port or '*'}")
                return
            except zmq.ZMQError as exc:
                if exc.errno != zmq.EADDRINUSE or port == last:
                    raise

    @property
    def present(self) -> set[int]:
        """The ranks that have said hello."""
        return set(self._names)

    def recv_nowait(self) -> list[Any]:
        """Return all messages that have arrived. Raises `ProtocolError` once what came before it was returned."""
        received = self._messages(self._receive)
        if self._wrong is None:  # all are read
            self._handshake_limiter.update()
        return received

    def _receive(self) -> Any:
        name, data = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self._handshake_limiter.note_message(data)
        message = _decode(self._decoder, data.bytes)
        if isinstance(message, Hello):
            self._names[message.rank] = name.bytes
        return message

    def tell(self, message: msgspec.Struct, but: Collection[int] = ()) -> list[int]:
        """Send *message* to all present ranks except *but*; return those whose connection is gone.

        What they have sent before can still be received.
        """
        data, gone = _encode(message), []
        for rank, name in self._names.items():
            if rank in but:
                continue
            try:
                self._socket.send_multipart([name, data], zmq.NOBLOCK)
            except zmq.ZMQError as exc:
                if exc.errno != errno.EHOSTUNREACH:
                    raise
                gone.append(rank)
        return gone

    def send_to_late_joiners(self, message: msgspec.Struct, told: Collection[int], n_others: int,
                             deadline: float) -> None:
        """Send *message*, the last one, to followers that still connect, and would wait for a leader that is gone.

        Blocks until *n_others* ranks have been *told*, or `time.monotonic` reaches *deadline*. Their messages are
        ignored.
        """
        heard = set(told)
        while len(heard) < n_others and (left_s := deadline - time.monotonic()) > 0:
            self.wait(None, left_s)
            with contextlib.suppress(ProtocolError):
                self.recv_nowait()
            late = self.present - heard
            if late:
                self.tell(message, but=heard)
                heard |= late

    def close(self) -> None:
        """Send what is queued, for at most a second. Idempotent."""
        if not self._context.closed:
            self._handshake_limiter.close()
            self._socket.close()
            self._context.term()


class FollowerChannel(_Channel):
    """A follower's end, connected to *host*:*port*. Owner thread only; only `wait` and `close` block.

    *leader*: the name of the other end in errors. Raises `ConfigError` if that is not an address.
    """

    def __init__(self, host: str, port: int, key: bytes, decoder: msgspec.msgpack.Decoder[Any] = _decoder,
                 leader: str = "rank 0") -> None:
        super().__init__(zmq.DEALER, decoder)
        self._leader = leader
        self.address = format_address(host, port)
        self._secure = self._lost = False
        self._socket.curve_publickey, self._socket.curve_secretkey = curve_pair(key, "node")
        self._socket.curve_serverkey = curve_pair(key, "scheduler")[0]
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        try:
            self._socket.connect(f"tcp://{self.address}")
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(f"{leader} says it listens at {self.address}, which is no address here: {exc}") from exc

    @property
    def is_connected(self) -> bool:
        """Whether the leader has answered, and `recv_nowait` has not found it gone."""
        return self._secure and not self._lost

    def recv_nowait(self) -> list[Any]:
        """Return all messages that have arrived.

        Raises `PeerLostError` if the connection to the leader is gone and all it sent has been returned;
        `ProtocolError` if it sent no message, once what came before it was returned.
        """
        lost = self._is_lost()  # before the last messages are read, so that none is missed
        received = self._messages(lambda: _decode(self._decoder, self._socket.recv(zmq.NOBLOCK)))
        if lost and not received:
            raise PeerLostError(f"{self._leader}'s process is gone: its connection to {self.address} broke without a "
                                "last word")
        return received

    def _is_lost(self) -> bool:
        while self._monitor.poll(0):
            event = monitor_event(self._monitor)[0]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._secure = True
            elif self._secure:
                self._lost = True
        return self._lost

    def tell(self, message: msgspec.Struct) -> None:
        """Send *message* to the leader, once the connection is established."""
        self._socket.send(_encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued, for at most a second. Idempotent."""
        if not self._context.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._context.term()
