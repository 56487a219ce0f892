"""What the ranks of one group tell each other about turns (`turns`), over ZeroMQ: rank 0 listens, the others connect.

Other groups say other messages over such lines (`negotiation_line`). Encrypted by CURVE, with keys that follow from a
key of this group alone (`security.curve_pair`): whoever does not have it gets no byte back. It reaches the ranks
through the group itself, so it is no safer than that.
"""
from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Collection
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import DECODE_ERRORS, ConfigError, PeerLostError, ProtocolError
from ..security import curve_pair
from ..zmq_connections import ZmqHandshakeLimiter, interface
from .turns import Entry

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_LINGER_MS = 1000
#: No message is longer.
_MESSAGE_MAX_NBYTES = 16 << 20


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Another rank: it is there."""

    rank: int


class Turns(msgspec.Struct, tag=True, frozen=True):
    """Rank 0: these begin next, in this order."""

    entries: tuple[Entry, ...]


class Begun(msgspec.Struct, tag=True, frozen=True):
    """Another rank: it has begun so many in all."""

    rank: int
    count: int


class Given(msgspec.Struct, tag=True, frozen=True):
    """Another rank: it has been given these (name, part). Only in groups whose turns wait for all."""

    rank: int
    keys: tuple[tuple[str, int], ...]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Anybody: nothing more is begun. `error`: the name of a class of `errors`; rank 0 passes it on."""

    error: str
    reason: str


class Left(msgspec.Struct, tag=True, frozen=True):
    """It has what it wanted, and closes. Rank 0 repeats it until all have, and so notices who is gone."""

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


class LeaderChannel:
    """Rank 0's end, at *host* alone if that is an address of this machine. Owner thread only.

    Nothing blocks but `wait` and `close`. *decoder*: of what is said there, `Hello` among it.

    Raises
    ------
    ConfigError
        If no port can be had.
    """

    def __init__(self, key: bytes, host: str = "", decoder: msgspec.msgpack.Decoder[Any] = _decoder) -> None:
        self._decoder = decoder
        self._wrong: ProtocolError | None = None  # what `recv_nowait` has yet to raise
        self._names: dict[int, bytes] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._doorkeeper = ZmqHandshakeLimiter(self._socket)
        self._socket.maxmsgsize = _MESSAGE_MAX_NBYTES
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = curve_pair(key, "scheduler")
        self._socket.linger = _LINGER_MS  # before bind, see `Scheduler`
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.router_mandatory = True  # who is gone is to be noticed
        self._socket.ipv6 = True
        try:
            self._socket.bind(f"tcp://{interface(host)}:*")
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(f"no port to listen on for the other ranks: {exc}") from exc
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    @property
    def present(self) -> set[int]:
        """The ranks that have said hello."""
        return set(self._names)

    def wait(self, wake_fd: int, timeout_s: float) -> None:
        """Sleep until something can be read, *wake_fd* can, or the time is over."""
        _wait((self._socket, self._doorkeeper.monitor), wake_fd, 0.0 if self._wrong is not None else timeout_s)

    def recv_nowait(self) -> list[Any]:
        """Return everything that has arrived. Raises `ProtocolError`, after what came before that was returned."""
        received: list[Any] = []
        if self._wrong is not None:
            wrong, self._wrong = self._wrong, None
            raise wrong
        while True:
            try:
                name, data = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._doorkeeper.look()
                return received
            self._doorkeeper.knows(data)
            try:
                message = _decode(self._decoder, data.bytes)
            except ProtocolError as exc:
                if not received:
                    raise
                self._wrong = exc
                return received
            if isinstance(message, Hello):
                self._names[message.rank] = name.bytes
            received.append(message)

    def tell(self, message: msgspec.Struct, but: Collection[int] = ()) -> list[int]:
        """Say *message* to all who are present, except the ranks in *but*; return those whose connection is gone.

        What they have said before can still be received.
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
        """Say *message*, the last one, to whoever is still connecting: he would wait for somebody who is gone.

        Blocks until *n_others* ranks have been *told*, or `time.monotonic` reaches *deadline*. What they say does not
        count any more.
        """
        heard = set(told)
        while len(heard) < n_others and (left_s := deadline - time.monotonic()) > 0:
            _wait((self._socket, self._doorkeeper.monitor), None, 0.0 if self._wrong is not None else left_s)
            with contextlib.suppress(ProtocolError):
                self.recv_nowait()
            late = self.present - heard
            if late:
                self.tell(message, but=heard)
                heard |= late

    def close(self) -> None:
        """Send what is still to be sent, for a second at most. Calling it again does nothing."""
        if not self._context.closed:
            self._doorkeeper.close()
            self._socket.close()
            self._context.term()


class FollowerChannel:
    """Another rank's end, connected to *host*:*port*. Owner thread only; nothing blocks but `wait` and `close`.

    *leader*: who listens there, for errors.

    Raises
    ------
    ConfigError
        If that cannot be an address.
    """

    def __init__(self, host: str, port: int, key: bytes, decoder: msgspec.msgpack.Decoder[Any] = _decoder,
                 leader: str = "rank 0") -> None:
        self._decoder = decoder
        self._leader = leader
        self._wrong: ProtocolError | None = None  # what `recv_nowait` has yet to raise
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._secure = self._lost = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_publickey, self._socket.curve_secretkey = curve_pair(key, "node")
        self._socket.curve_serverkey = curve_pair(key, "scheduler")[0]
        self._socket.linger = _LINGER_MS
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.ipv6 = True
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        try:
            self._socket.connect(f"tcp://{self.address}")
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(f"{leader} says it listens at {self.address}, which is no address here: {exc}") from exc

    @property
    def is_connected(self) -> bool:
        """Whether the leader has been understood, and `recv_nowait` has not found it gone."""
        return self._secure and not self._lost

    def wait(self, wake_fd: int, timeout_s: float) -> None:
        """Sleep until something can be read, *wake_fd* can, or the time is over."""
        _wait((self._socket, self._monitor), wake_fd, 0.0 if self._wrong is not None else timeout_s)

    def recv_nowait(self) -> list[Any]:
        """Return everything that has arrived.

        Raises
        ------
        PeerLostError
            If the connection to the leader is gone and all it said has been returned.
        ProtocolError
            If it says what is no message, after what came before that was returned.
        """
        if self._wrong is not None:
            wrong, self._wrong = self._wrong, None
            raise wrong
        lost = self._is_lost()  # before the last words are read, so that none is missed
        received: list[Any] = []
        while True:
            try:
                received.append(_decode(self._decoder, self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
            except ProtocolError as exc:
                if not received:
                    raise
                self._wrong = exc
                return received
        if lost and not received:
            raise PeerLostError(f"{self._leader}'s process is gone: its connection to {self.address} broke without a "
                                "last word")
        return received

    def _is_lost(self) -> bool:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._secure = True
            elif self._secure:
                self._lost = True
        return self._lost

    def tell(self, message: msgspec.Struct) -> None:
        """Say *message* to the leader; before the connection stands, as soon as it does."""
        self._socket.send(_encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is still to be sent, for a second at most. Calling it again does nothing."""
        if not self._context.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._context.term()


def _wait(sockets: tuple[zmq.Socket[bytes], ...], wake_fd: int | None, timeout_s: float) -> None:
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    if wake_fd is not None:
        poller.register(wake_fd, zmq.POLLIN)
    poller.poll(int(timeout_s * 1000))
