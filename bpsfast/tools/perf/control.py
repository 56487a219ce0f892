"""The control connection of ``bpsfast perf``, ``ping`` and ``tune rdma``: messages, and the key that both sides prove.

TCP: the handshake of `orchestration.security`, by a key that both sides hold (`secret_for`), then messages in the
frames of `base.framing`.
"""
from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Union

import msgspec

from ...base.addresses import family_of, is_loopback
from ...base.framing import Frames
from ...base.job_key import given_key, job_key
from ...base.resources import Closing
from ...base.settings import Settings
from ...orchestration import security
from ...orchestration.errors import BpsError, ConfigError, MismatchError, PeerLostError, ProtocolError, StallError
from ...orchestration.handshakes import HandshakeAcceptor
from ...orchestration.host_lookup import format_address
from .perf_plan import Plan

#: Version of the messages and their order; both sides need the same.
VERSION = 3


class Propose(msgspec.Struct, tag=True, frozen=True):
    """Client: what to measure. `place` describes the client. `device` is the server's port, "" for its own choice."""

    plan: Plan
    place: dict[str, Any]
    device: str = ""


class Agree(msgspec.Struct, tag=True, frozen=True):
    """Server: accepts what the client proposed."""

    place: dict[str, Any]


class Offer(msgspec.Struct, tag=True, frozen=True):
    """The address of the sender's end of the measured connection (its `offer`)."""

    fields: dict[str, Any]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The sender is ready for *step*."""

    step: str


class Alive(msgspec.Struct, tag=True, frozen=True):
    """The sender is still measuring."""


class Sent(msgspec.Struct, tag=True, frozen=True):
    """Number of messages that the sender has sent in a run by time; it sends no more."""

    n: int


class Done(msgspec.Struct, tag=True, frozen=True):
    """The sender's loop has ended: messages sent, seconds taken, and what its ports counted."""

    sent: int
    seconds: float
    peak: float | None
    counters: list[dict[str, Any]]


class Result(msgspec.Struct, tag=True, frozen=True):
    """Client: one row of results, for the server to show."""

    row: dict[str, Any]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """The sender ends the conversation: in order (no *reason*), or because of an error."""

    reason: str = ""


class Ask(msgspec.Struct, tag=True, frozen=True):
    """A request to a listener of ``ping`` or ``tune rdma``: do *what* with these *fields*."""

    what: str
    fields: dict[str, Any]


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Ask`."""

    fields: dict[str, Any]


Message = Union[Propose, Agree, Offer, Ready, Alive, Sent, Done, Result, Stop, Ask, Answer]  # noqa: UP007

DEFAULT_PORT = 18515
_LOOPBACK = "127.0.0.1"
_CONTEXT = "bpsfast perf"
_HANDSHAKE_S = 5.0
#: Pause between two attempts to connect to a server that does not listen yet.
_RETRY_S = 0.1
#: Longest wait for the last message of a peer that is gone.
REASON_S = 1.0
_DECODER = msgspec.msgpack.Decoder(Message)
_log = logging.getLogger("bpsfast")


class Secret(NamedTuple):
    """The key of the handshake, and whether it is public."""

    key: bytes
    is_public: bool = False


def secret_for(loaded: Settings, hosts: Sequence[str]) -> Secret:
    """Return the key for talking to *hosts*, or for listening on one of them.

    This is the job key if one is given. Without one, processes on this machine use the key of jobs on it; with other
    machines ``BPSFAST_INSECURE=1`` is required, and the key is public; else a `ConfigError` is raised.
    """
    if given_key(loaded) or all(map(is_loopback, hosts)):
        return Secret(job_key(msgspec.structs.replace(loaded, encryption="off"), "127.0.0.1:0"))
    if loaded.insecure:
        return Secret(security.job_key(None, _CONTEXT), True)
    raise ConfigError(f"measuring with other machines ({', '.join(hosts)}) needs a key: set BPSFAST_JOB_KEY to the "
                      "same random hex on both sides (openssl rand -hex 32), or BPSFAST_INSECURE=1 to measure without "
                      "a key")


class ListenAddress(NamedTuple):
    """An address to listen on ("": all addresses), the key, and a remark to print."""

    host: str
    secret: Secret
    remark: str = ""


def listen_address(loaded: Settings, host: str) -> ListenAddress:
    """Return the address to listen on: *host*, or without a key the loopback. Errors: as `secret_for`."""
    if host or loaded.insecure or given_key(loaded):
        return ListenAddress(host, secret_for(loaded, [host or "all addresses"]))
    return ListenAddress(
        _LOOPBACK, secret_for(loaded, [_LOOPBACK]), ", for this machine only: to measure with others set "
        "BPSFAST_JOB_KEY to the same random hex on both sides (openssl rand -hex 32), or BPSFAST_INSECURE=1")


class Control(Closing):
    """One end of the control connection; owns the socket. One thread. A peer silent for *timeout_s* is stalled."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._heard_s = time.monotonic()
        self.timeout_s = timeout_s
        # a dual-stack socket shows IPv4 addresses mapped to IPv6
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
            raise StallError(f"{self.peer} has read nothing for {self.timeout_s:g} s") from exc
        except OSError as exc:
            raise self.reason(REASON_S) or self._gone(exc) from exc

    def receive(self, kind: type | tuple[type, ...], what: str, fd: int | None = None,
                pulse_s: float | None = None) -> Any:
        """Return the next message, which must be a *kind*; None if *fd* became readable first, or *pulse_s* passed.

        `Alive` restarts the deadline, and is sent at each pulse. With *fd* there is no deadline, because a local run
        has its own. *what* names the expected message in errors. Raises `StallError` if the peer is silent for
        `timeout_s`, `PeerLostError` if it is gone, `BpsError` with its reason if it stopped, and `ProtocolError` if it
        sent another message.
        """
        began = time.monotonic()
        pulse = None if pulse_s is None else began + pulse_s
        if pulse is None:
            self._heard_s = began  # without pulses nobody has read meanwhile
        while True:
            message = self._frames.next()
            if isinstance(message, Alive):
                continue
            if isinstance(message, Stop) and kind is not Stop:
                raise BpsError(f"{self.peer} stopped: {message.reason or 'it finished before this side'}")
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
        """Return the peer's reason for stopping if it arrives within *wait_s*, else None."""
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
        """Tell the peer that this side ends. Errors are ignored."""
        with contextlib.suppress(OSError):
            self._sock.settimeout(1.0)
            self._sock.sendall(self._frames.pack(Stop(reason)))

    def abort(self, reason: str) -> None:
        """Any thread: tell the peer why, and shut the connection down for its user here."""
        self.stop(reason)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._sock.close()


def listen(port: int, host: str = "") -> socket.socket:
    """Return a socket that listens on *port* of *host*, or of all addresses."""
    try:
        if host:
            return socket.create_server((host, port), family=family_of(host))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except (OSError, UnicodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        other = ", BPSFAST_NODE_HOST another address" if host else ""
        where = f"port {port} of {host!r}" if host else f"port {port}"
        raise ConfigError(f"cannot listen on {where}: {why}; -p chooses another port (on both sides){other}") from exc


def accept(listener: socket.socket, key: bytes, timeout_s: float, silence_s: float) -> Control:
    """Wait up to *timeout_s* for a client that proves *key*; refused clients do not delay it."""
    clients: queue.Queue[Control] = queue.Queue()
    refused: deque[str] = deque(maxlen=3)
    acceptor = handshake_acceptor(listener.dup(), key, silence_s, clients.put, lambda exc: refused.append(str(exc)),
                                  refused.append)
    with contextlib.closing(acceptor):
        acceptor.start()
        try:
            found = clients.get(timeout=timeout_s)
        except queue.Empty:
            also = f"; refused: {'; '.join(refused)}" if refused else ""
            raise StallError(f"no client came within {timeout_s:g} s to port {listener.getsockname()[1]}{also}") \
                from None
    while not clients.empty():
        clients.get().close()  # another client came at the same time
    return found


def handshake_acceptor(listener: socket.socket, key: bytes, silence_s: float, serve: Callable[[Control], None],
                       refused: Callable[[Exception], None], warn: Callable[[str], None],
                       name: str = "bpsfast-perf") -> HandshakeAcceptor[Control]:
    """Return a `HandshakeAcceptor` that owns *listener* and calls *serve* with each client in a thread of its own."""
    return HandshakeAcceptor(
        listener, lambda sock: _control(sock, silence_s, lambda: security.plain_handshake_acceptor(
            sock, key, _CONTEXT, peer=0, epoch=VERSION, timeout_s=_HANDSHAKE_S)),
        lambda sock, control: serve(control), refused, warn, name=name)


@contextlib.contextmanager
def serving(listener: socket.socket, key: bytes, silence_s: float, most: int, what: str,
            answer: Callable[[Control], None]) -> Iterator[HandshakeAcceptor[Control]]:
    """Call *answer* with each of at most *most* clients at a time, in a thread of its own; log errors as *what*."""
    places = threading.BoundedSemaphore(most)

    def serve(control: Control) -> None:
        with control:
            if not places.acquire(blocking=False):
                return control.stop(f"it already has {most} clients, the most it accepts")
            try:
                answer(control)
            except (BpsError, OSError, ValueError) as exc:
                _log.info("%s: %s", what, exc)
            finally:
                places.release()

    acceptor = handshake_acceptor(
        listener.dup(), key, silence_s, serve, lambda exc: _log.info("%s: %s", what, exc),
        lambda words: _log.warning("%s: %s", what, words), f"bpsfast-{what}")
    with contextlib.closing(acceptor):
        acceptor.start()
        yield acceptor


def connect(host: str, port: int, key: bytes, timeout_s: float, silence_s: float) -> Control:
    """Connect to the server, retrying for *timeout_s* while nobody listens.

    Raises `StallError` if nobody answers, `ConfigError` if the name cannot be resolved, `MismatchError` if keys differ.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
            break
        except (socket.gaierror, UnicodeError) as exc:  # UnicodeError: a label of the name is empty or too long
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise ConfigError(f"host name {host!r} cannot be resolved: {why}") from exc
        except OSError as exc:
            if time.monotonic() + _RETRY_S >= deadline:
                raise StallError(f"no process answers at {format_address(host, port)} within {timeout_s:g} s ({exc}); "
                                 "check that `bpsfast` listens there with the same -p, and that the port is open"
                                 ) from exc
            time.sleep(_RETRY_S)
    hello = security.StreamHello(peer=0, stream=0, epoch=VERSION)
    return _control(sock, silence_s, lambda: security.plain_handshake_dialer(sock, key, _CONTEXT, hello, _HANDSHAKE_S))


def _control(sock: socket.socket, silence_s: float, shake_hands: Callable[[], security.StreamHello]) -> Control:
    """Return the connection over *sock* once both sides have proved the key; close *sock* on failure."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = shake_hands()
        control = Control(sock, silence_s)
        if theirs.epoch != VERSION:
            raise MismatchError(f"{control.peer} uses version {theirs.epoch} of the protocol, this side version "
                                f"{VERSION}: install the same version on both sides")
        return control
    except BaseException:
        sock.close()
        raise


def host_and_port(text: str, default_port: int) -> tuple[str, int]:
    """Parse HOST[:PORT]; an IPv6 address needs brackets if a port follows."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        return text.strip("[]"), default_port
    if not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise ConfigError(f"{text!r}: expected HOST or HOST:PORT")
    return host.strip("[]"), int(port)
