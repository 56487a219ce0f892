"""The connection over which two sides agree what to measure, and learn at once when the other one is gone.

TCP: the handshake of `orchestration.security`, then messages in the frames of `base.framing`.
Both sides hold a key, see `secret_for`.
"""
from __future__ import annotations

import contextlib
import queue
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Union

import msgspec

from ...base.framing import Frames
from ...base.settings import Settings
from ...launch.process_role import format_address, given_key, is_loopback, job_key
from ...orchestration import security
from ...orchestration.errors import (
    BpsError,
    ConfigError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    StallError,
)
from ...orchestration.handshakes import HandshakeAcceptor
from .perf_plan import Plan

#: Of the messages and their order; both sides have to have the same.
VERSION = 2


class Propose(msgspec.Struct, tag=True, frozen=True):
    """Client: what to measure. `place`: whose side this is, for people. `device`: the server's, "" as it likes."""

    plan: Plan
    place: dict[str, Any]
    device: str = ""


class Agree(msgspec.Struct, tag=True, frozen=True):
    """Server: it will be measured."""

    place: dict[str, Any]


class Offer(msgspec.Struct, tag=True, frozen=True):
    """How the sender of this can be reached by what is measured (`End.offer`)."""

    fields: dict[str, Any]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The sender of this has done what comes before *step*."""

    step: str


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Still measuring."""


class Sent(msgspec.Struct, tag=True, frozen=True):
    """The sender of this sent so much in a run by time, and sends no more."""

    n: int


class Done(msgspec.Struct, tag=True, frozen=True):
    """The sender's loop ended: what it sent and how long that took, and what its ports counted meanwhile."""

    sent: int
    seconds: float
    peak: float | None
    counters: list[dict[str, Any]]


class Result(msgspec.Struct, tag=True, frozen=True):
    """Client: one row, for the server to show as well."""

    row: dict[str, Any]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """The sender of this ends here: orderly (no *reason*), or because of one."""

    reason: str = ""


class Ask(msgspec.Struct, tag=True, frozen=True):
    """To a listener of ``bpsfast ping``: do *what* with these *fields*."""

    what: str
    fields: dict[str, Any]


class Answer(msgspec.Struct, tag=True, frozen=True):
    """To `Ask`."""

    fields: dict[str, Any]


Message = Union[Propose, Agree, Offer, Ready, Alive, Sent, Done, Result, Stop, Ask, Answer]  # noqa: UP007

DEFAULT_PORT = 18515
_LOOPBACK = "127.0.0.1"
_CONTEXT = "bpsfast perf"
_HANDSHAKE_S = 5.0
#: Pause between two tries to connect to a server that does not listen yet.
_RETRY_S = 0.1
#: How long the words of a peer that is gone may be under way.
_REASON_S = 1.0


_DECODER = msgspec.msgpack.Decoder(Message)


class Secret(NamedTuple):
    """The key of the handshake, and whether it is one that everybody knows."""

    key: bytes
    is_public: bool = False


def secret_for(loaded: Settings, hosts: Sequence[str]) -> Secret:
    """Return the key for talking to *hosts*, or for listening on one of them.

    It is the job's key if one is given. Without one, processes of this machine have the key that jobs on it have; with
    other machines only ``BPSFAST_INSECURE=1`` allows to go on, with a key that everybody knows.

    Raises
    ------
    ConfigError
        There is no key, and there has to be one.
    """
    if given_key(loaded) or all(map(is_loopback, hosts)):
        return Secret(job_key(msgspec.structs.replace(loaded, encryption="off"), "127.0.0.1:0"))
    if loaded.insecure:
        return Secret(security.job_key(None, _CONTEXT), True)
    raise ConfigError(f"measuring with other machines ({', '.join(hosts)}) needs a key: set BPSFAST_JOB_KEY to the "
                      "same random hex on both sides (openssl rand -hex 32), or BPSFAST_INSECURE=1 to do without")


class ListenAddress(NamedTuple):
    """Where to listen ("": on all addresses), with which key, and what to add when people are told."""

    host: str
    secret: Secret
    remark: str = ""


def listen_address(loaded: Settings, host: str) -> ListenAddress:
    """Return where to listen if *host* is wished ("": no matter); without a key, on the loopback alone.

    Errors: as `secret_for`.
    """
    if host or loaded.insecure or given_key(loaded):
        return ListenAddress(host, secret_for(loaded, [host or "all addresses"]))
    return ListenAddress(
        _LOOPBACK, secret_for(loaded, [_LOOPBACK]), ", for this machine only: to measure with others set "
        "BPSFAST_JOB_KEY to the same random hex on both sides (openssl rand -hex 32), or BPSFAST_INSECURE=1")


class Control:
    """One end of the connection, which is this object's. One thread.

    *timeout_s*: silence after which the peer counts as stalled.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._heard_s = time.monotonic()
        self.timeout_s = timeout_s
        # a socket for both kinds of addresses shows IPv4 ones mapped
        self.peer_host: str = sock.getpeername()[0].removeprefix("::ffff:")
        self.peer = format_address(self.peer_host, sock.getpeername()[1])
        self._frames = Frames(_DECODER.decode, f"a message of {self.peer}", "another version of bpsfast?")
        self.own_host: str = sock.getsockname()[0].removeprefix("::ffff:")
        sock.settimeout(timeout_s)

    def send(self, message: Message) -> None:
        """Send *message*; raises `PeerLostError` or `StallError`."""
        try:
            self._sock.sendall(self._frames.pack(message))
        except TimeoutError as exc:
            raise StallError(f"{self.peer} takes no message: nothing was read there for {self.timeout_s:g} s") from exc
        except OSError as exc:
            raise self.reason(_REASON_S) or self._gone(exc) from exc

    def receive(self, kind: type | tuple[type, ...], what: str, fd: int | None = None,
                pulse_s: float | None = None) -> Any:
        """Return the next message, which has to be a *kind*; None if *fd* became readable before, or *pulse_s* passed.

        `Alive` starts the deadline anew, and is sent at each pulse. With *fd* there is no deadline: something runs here
        that has its own. *what* is awaited, in words, for errors.

        Raises
        ------
        StallError, PeerLostError
            After `timeout_s` of silence; when the peer is gone.
        BpsError
            With the peer's reason, if it stopped.
        ProtocolError
            When it says something else.
        """
        began = time.monotonic()
        pulse = None if pulse_s is None else began + pulse_s
        if pulse is None:
            self._heard_s = began  # nobody looked before; with pulses somebody does
        while True:
            message = self._frames.next()
            if isinstance(message, Alive):
                continue
            if isinstance(message, Stop) and kind is not Stop:
                raise BpsError(f"{self.peer} stopped: {message.reason or 'it was done before we were'}")
            if isinstance(message, kind):
                return message
            if message is not None:
                raise ProtocolError(f"{self.peer} sent {type(message).__name__}; expected: {what}")
            now, deadline = time.monotonic(), self._heard_s + self.timeout_s
            if fd is None and now >= deadline:
                raise StallError(f"{self.peer} said nothing for {self.timeout_s:g} s; expected: {what}")
            if pulse is not None and now >= pulse:
                self.send(Alive())
                return None
            watched: list[Any] = [self._sock] if fd is None else [self._sock, fd]
            found = select.select(watched, [], [], max(0.0, (deadline if pulse is None else pulse) - now))[0]
            if self._sock in found:
                self._read()
            elif found:
                return None

    def _read(self) -> None:
        self._heard_s = time.monotonic()
        try:
            data = self._sock.recv(1 << 16)
        except OSError as exc:
            raise self._gone(exc) from exc
        if not data:
            raise self._gone(None)
        self._frames.feed(data)

    def reason(self, wait_s: float) -> BpsError | None:
        """Return why the peer said it stopped, if it does within *wait_s*, for a side that cannot go on anyway."""
        deadline = time.monotonic() + wait_s
        try:
            while True:
                while (message := self._frames.next()) is not None:
                    if isinstance(message, Stop) and message.reason:
                        return BpsError(f"{self.peer} stopped: {message.reason}")
                if not select.select([self._sock], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    return None
                self._read()
        except (BpsError, OSError):
            return None

    def _gone(self, exc: OSError | None) -> PeerLostError:
        return PeerLostError(f"{self.peer} closed the connection{f' ({exc})' if exc else ''}: its process ended or was "
                             "interrupted; its own output says why")

    def stop(self, reason: str = "") -> None:
        """Tell the peer that we end; that it is gone already is no matter."""
        try:
            self._sock.settimeout(1.0)
            self._sock.sendall(self._frames.pack(Stop(reason)))
        except OSError:
            pass

    def cut(self, reason: str) -> None:
        """Any thread: tell the peer why, and end the connection under whoever uses it here."""
        self.stop(reason)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._sock.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def listen(port: int, host: str = "") -> socket.socket:
    """Return a socket that listens on *port* of every address, or of *host*."""
    try:
        if host:
            return socket.create_server((host, port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except (OSError, UnicodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        other = ", BPSFAST_NODE_HOST another address" if host else ""
        where = f"port {port} of {host!r}" if host else f"port {port}"
        raise ConfigError(f"cannot listen on {where}: {why}; -p chooses another port (on both sides){other}") from exc


def accept(listener: socket.socket, key: bytes, timeout_s: float, silence_s: float) -> Control:
    """Wait for a client that holds *key*, up to *timeout_s*; strangers are sent away, and keep nobody waiting."""
    came: queue.Queue[Control] = queue.Queue()
    refused: deque[str] = deque(maxlen=3)
    door = handshake_acceptor(listener.dup(), key, silence_s, came.put, lambda exc: refused.append(str(exc)),
                              refused.append)
    with contextlib.closing(door):
        door.start()
        try:
            found = came.get(timeout=timeout_s)
        except queue.Empty:
            also = f"; refused: {'; '.join(refused)}" if refused else ""
            raise StallError(f"no client came within {timeout_s:g} s to port {listener.getsockname()[1]}{also}") \
                from None
    while not came.empty():
        came.get().close()  # one more came at the same time
    return found


def handshake_acceptor(listener: socket.socket, key: bytes, silence_s: float, came: Callable[[Control], None],
            refused: Callable[[Exception], None], warn: Callable[[str], None], name: str = "bpsfast-perf") -> \
        HandshakeAcceptor[Control]:
    """Return a door on *listener*, the door's from now on, that calls *came* with each client, in a thread of its own.

    The others: see `HandshakeAcceptor`.
    """
    return HandshakeAcceptor(listener, lambda sock: greet(sock, key, silence_s), lambda sock, control: came(control),
                             refused, warn, name=name)


def greet(sock: socket.socket, key: bytes, silence_s: float) -> Control:
    """Do the acceptor's half of the handshake on *sock*, which is closed if that fails."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = security.plain_handshake_acceptor(sock, key, _CONTEXT, peer=0, epoch=VERSION, timeout_s=_HANDSHAKE_S)
        return _checked(Control(sock, silence_s), theirs)
    except BaseException:
        sock.close()
        raise


def connect(host: str, port: int, key: bytes, timeout_s: float, silence_s: float) -> Control:
    """Connect to the server, trying again up to *timeout_s* while nobody listens there.

    Raises
    ------
    StallError, ConfigError, MismatchError
        Nobody listens or answers; the name has no address; the key is another one.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
            break
        except (socket.gaierror, UnicodeError) as exc:  # UnicodeError: no name at all, a label is empty or too long
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise ConfigError(f"host name {host!r} cannot be resolved: {why}") from exc
        except OSError as exc:
            if time.monotonic() + _RETRY_S >= deadline:
                raise StallError(f"nobody answers at {host}:{port} within {timeout_s:g} s ({exc}): does `bpsfast` "
                                 "listen there, with the same -p, and is the port open?") from exc
            time.sleep(_RETRY_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = security.StreamHello(peer=0, stream=0, epoch=VERSION)
        return _checked(Control(sock, silence_s),
                        security.plain_handshake_dialer(sock, key, _CONTEXT, hello, _HANDSHAKE_S))
    except BaseException:
        sock.close()
        raise


def _checked(control: Control, theirs: security.StreamHello) -> Control:
    if theirs.epoch != VERSION:
        raise MismatchError(f"{control.peer} measures by version {theirs.epoch} of the protocol, this bpsfast by "
                            f"{VERSION}: install the same version on both sides")
    return control


def host_and_port(text: str, default_port: int) -> tuple[str, int]:
    """Return HOST[:PORT] as two; an IPv6 address stands in brackets if a port follows."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        return text.strip("[]"), default_port
    if not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise ConfigError(f"{text!r}: expected HOST or HOST:PORT")
    return host.strip("[]"), int(port)
