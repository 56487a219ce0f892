"""Connects two ranks for messages, at first use; the addresses are in the job's key-value store.

Each pair of ranks has one connection. Every endpoint listens on a local socket, and on a port if the job has several
nodes. The rank that needs the other dials. Both prove that they hold the job's key (`orchestration.security`) and name
themselves before anything else is read. With the setting encryption all that follows is encrypted. The acceptor then
sends one byte: JOINED, and frames follow; CROSSED: both have dialled, and the connection of the lower rank is used; or
REFUSED. A lower rank sends CROSSED only when its own connection is open: where a firewall blocks that direction, the
other connection is used.
"""
from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ...base import message_socket
from ...base.addresses import family_of, is_loopback, listening_socket
from ...base.encryption import Encryption, check_library, seals_of
from ...base.logs import RateLimitedLog
from ...base.process_identity import network_id
from ...orchestration import security
from ...orchestration.errors import (
    DECODE_ERRORS,
    BpsError,
    ClosedError,
    ConfigError,
    PeerLostError,
    ProtocolError,
    StallError,
)
from ...orchestration.handshakes import (
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_PROBES,
    MAX_PENDING_HANDSHAKES,
    RECHECK_S,
    HandshakeLimiter,
    source_of,
)
from ...orchestration.host_lookup import format_address, resolve
from ...orchestration.job.node_losses import FIRST_EPOCH
from ...trainer.session import Session
from .encrypted_socket import EncryptedSocket

log = logging.getLogger("bpsfast.collectives.p2p")

JOINED, CROSSED, REFUSED = b"J", b"C", b"R"
_CONTEXT = "bpsfast post"
#: How long an unauthenticated connection may occupy a thread.
_CHALLENGE_S = 5.0
#: A rank publishes its address when it first exchanges messages, maybe hours after others. Waiting calls have deadlines
#: of their own.
_ADDRESS_S = 86_400.0
#: How long accepting pauses after it has failed, for example because of too many open files.
_ACCEPT_PAUSE_S = 1.0


class Address(msgspec.Struct, frozen=True):
    """Where a rank's endpoint listens: on the local socket `local` of `machine`, at `host`:`port` (0: nowhere)."""

    node: int
    machine: str
    local: str
    host: str
    port: int


class PeerConnector:
    """Dials the endpoints of *session*'s job and accepts connections from them.

    *come* is called with (rank, socket, process id or 0) when an authenticated rank has dialled; it returns False to
    refuse it, else it owns the socket and sends the acceptor's byte. *reached* is called with the same when another
    rank has accepted this one (JOINED), *failed* with (rank, error) when a rank cannot be reached, and *listen* when
    `listens` has changed.
    """

    def __init__(self, session: Session, come: Callable[[int, socket.socket, int], bool],
                 reached: Callable[[int, socket.socket, int], None], failed: Callable[[int, BpsError], None],
                 listen: Callable[[], None]) -> None:
        self._session = session
        self._come, self._reached, self._failed, self._tell_listening = come, reached, failed, listen
        self._key = session.role.job_key
        self._encryption = Encryption.of(session.settings)
        self._closed = False
        self._lock = threading.Lock()
        self._refusals = RateLimitedLog(log)
        self._threads: set[threading.Thread] = set()
        self._unauthenticated: set[socket.socket] = set()
        self._handshakes: HandshakeLimiter[socket.socket] = HandshakeLimiter(
            MAX_PENDING_HANDSHAKES + session.size, session.size)
        self._makes_room = False
        self._accept_again_at = 0.0  # by the monotonic clock; 0: it hears
        self._has_warned = False
        self._doing: dict[int, str] = {}  # by rank that is dialled, in words
        self._machine = f"{network_id()} {os.getuid()}"
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listeners = [self._local]
        try:
            self._address = self._listen()
            for listener in self.listeners:
                listener.setblocking(False)
            session.key_values.publish(_key_of(session.rank), msgspec.msgpack.encode(self._address))
        except BaseException:
            for listener in self.listeners:
                listener.close()
            raise

    def _listen(self) -> Address:
        session = self._session
        name = message_socket.address(self._key, f"post {session.rank} {secrets.token_hex(8)}")
        self._local.bind(name)
        self._local.listen(128)
        host, port = "", 0
        if session.n_nodes > 1:
            host = session.host
            may_leave = self._encryption is Encryption.BETWEEN_MACHINES and not is_loopback(host)
            if may_leave or self._encryption is Encryption.ALL:
                check_library()
            listener = listening_socket(host, session.settings.ports)
            self.listeners.append(listener)
            port = listener.getsockname()[1]
        return Address(session.node, self._machine, name[1:].decode(), session.settings.advertise or host, port)

    def trouble(self, rank: int) -> str:
        """Return how far the connection to *rank* is, in words."""
        return self._doing.get(rank, "it has dialled too, and its connection is expected")

    def dial(self, rank: int) -> None:
        """Connect to *rank* in another thread, which calls `reached`, `come` or `failed`."""
        self._doing[rank] = "it has not sent or received anything yet"
        self._begin(lambda: self._dial(rank), f"bpsfast-p2p-dial-{rank}")

    @property
    def listens(self) -> bool:
        """Whether `accept` may be called: not while accepting pauses, or too many connections are unauthenticated."""
        with self._lock:
            return self._handshakes.has_room and not self._accept_again_at

    def accept(self, listener: socket.socket) -> None:
        """Accept a connection at *listener* and authenticate it in another thread. Never blocks."""
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has closed it again
            return
        except OSError as exc:
            self._pause_accepting(exc)
            return
        if sock.family == socket.AF_UNIX and message_socket.peer_uid(sock)[1] != os.getuid():
            sock.close()  # other users must not use up the limit of connections
            self._refuse(ProtocolError("another user's process has connected"))
            return
        with self._lock:
            self._handshakes.add(sock, source_of(sock), time.monotonic())
            is_full = not self._handshakes.has_room
            makes_room = is_full and not self._makes_room
            self._makes_room = self._makes_room or is_full
        if is_full:
            self._tell_listening()
        self._begin(lambda: self._welcome(sock), "bpsfast-p2p-accept")
        if makes_room:
            self._begin(self._make_room, "bpsfast-p2p-room")

    def _make_room(self) -> None:
        """While the limit is reached, drop one unauthenticated connection for each one that waits."""
        while True:
            with self._lock:
                if self._closed or self._handshakes.has_room:
                    self._makes_room = False
                    break
                if _is_waited_at(self.listeners):
                    going = self._handshakes.one_to_go(time.monotonic())
                    if going is not None:
                        self._handshakes.remove(going)
                        with contextlib.suppress(OSError):
                            going.shutdown(socket.SHUT_RDWR)  # its thread says so, and closes it
                        continue
            time.sleep(RECHECK_S)
        self._tell_listening()

    def _pause_accepting(self, error: OSError) -> None:
        """Accept nothing for a while: the waiting connection would be reported again at once."""
        with self._lock:
            if self._closed:
                return
            self._accept_again_at = time.monotonic() + _ACCEPT_PAUSE_S
            warned, self._has_warned = self._has_warned, True
        if not warned:
            log.warning("rank %d cannot accept connections for messages: %s; it tries again every %g s (too many "
                        "open files: see ulimit -n)", self._session.rank, error, _ACCEPT_PAUSE_S)
        self._tell_listening()

    def tick(self) -> None:
        """Resume accepting after a pause. Called periodically."""
        if self._accept_again_at and time.monotonic() >= self._accept_again_at:
            with self._lock:
                self._accept_again_at = 0.0
            self._tell_listening()

    def close(self) -> None:
        """Close the listeners. Waits for handshakes under way, which are short; look-ups are cancelled.

        A callback of a transfer may call this in one of the connector's own threads.
        """
        with self._lock:
            self._closed = True
        for listener in self.listeners:
            listener.close()
        with self._lock:
            threads = self._threads - {threading.current_thread()}
            for sock in self._unauthenticated:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # whoever reads from it wakes up
        for thread in threads:
            thread.join()

    # -- in threads of their own -----------------------------------------------------------------------------------

    def _begin(self, task: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                task()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    @contextlib.contextmanager
    def _interruptible(self, sock: socket.socket) -> Iterator[None]:
        """Let `close` interrupt the use of *sock* in this context."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"the message endpoint of rank {self._session.rank} is closed")
            self._unauthenticated.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._unauthenticated.discard(sock)

    def _dial(self, rank: int) -> None:
        session = self._session
        try:
            found = self._find(rank)
            self._doing[rank] = "it is dialled"
            near = self._is_near(rank, found)
            host = "" if near else resolve(found.host, self._patience_s)
            sock = socket.socket(socket.AF_UNIX if near else family_of(host), socket.SOCK_STREAM)
            try:
                with self._interruptible(sock):
                    self._connect(sock, rank, found, host)
                    hello = security.StreamHello(peer=session.rank, stream=rank, epoch=FIRST_EPOCH,
                                                 encrypted=self._encryption.covers(sock))
                    answer, secret = security.handshake_as_dialer(sock, self._key, _CONTEXT, hello, self._patience_s)
                    if answer.peer != rank:
                        raise ProtocolError(f"rank {answer.peer} listens where rank {rank} should")
                sock = self._sealed(sock, secret, dialled=True)
                with self._interruptible(sock):
                    verdict = self._verdict(sock, rank)
            except BaseException:
                sock.close()
                raise
            if verdict == JOINED:
                self._reached(rank, sock, _process_of(sock))
            else:
                sock.close()
                if verdict != CROSSED:
                    raise PeerLostError(f"rank {rank} has refused a connection of rank {session.rank}, which it takes "
                                        "for lost: see its output")
            self._doing.pop(rank, None)
        except BpsError as exc:
            self._failed(rank, exc)
        except OSError as exc:
            self._failed(rank, PeerLostError(f"rank {session.rank} cannot connect to rank {rank}: {exc}"))

    def _find(self, rank: int) -> Address:
        data = self._session.key_values.lookup(_key_of(rank), _ADDRESS_S, f"rank {rank}", lambda: self._closed)
        try:
            return msgspec.msgpack.decode(data, type=Address)
        except DECODE_ERRORS as exc:
            raise ProtocolError(f"the address of rank {rank}'s message endpoint cannot be read: {exc}") from exc

    def _is_near(self, rank: int, found: Address) -> bool:
        settings = self._session.settings
        shares = settings.transport in ("auto", "shm") and settings.allow_shm
        near = found.machine == self._machine and (shares or found.node == self._address.node)
        if not near and not found.port:
            raise ConfigError(f"rank {rank} is on another machine or another user's, and listens on no network: "
                              "its job has one node only")
        return near

    def _connect(self, sock: socket.socket, rank: int, found: Address, host: str) -> None:
        near = sock.family == socket.AF_UNIX
        sock.settimeout(self._patience_s)
        try:
            sock.connect("\0" + found.local if near else (host, found.port))
        except OSError as exc:
            where = "its local socket" if near else format_address(found.host, found.port)
            raise PeerLostError(f"rank {rank} does not listen on {where} any more ({exc}): it has ended, or a firewall "
                                "is between") from exc
        if not near:
            _prepare(sock)
        elif message_socket.peer_uid(sock)[1] != os.getuid():
            raise ProtocolError(f"another user's process listens on rank {rank}'s local socket")

    def _verdict(self, sock: socket.socket, rank: int) -> bytes:
        sock.settimeout(self._patience_s)
        try:
            verdict = sock.recv(1)
        except TimeoutError as exc:
            raise StallError(f"rank {rank} did not answer a connection within {self._patience_s:g} s") from exc
        return verdict

    def _welcome(self, sock: socket.socket) -> None:
        """Authenticate one connection. One that fails is logged and refused."""
        session, taken = self._session, False
        try:
            if sock.family != socket.AF_UNIX:
                _prepare(sock)
            try:
                with self._interruptible(sock):
                    hello, secret = security.handshake_as_acceptor(
                        sock, self._key, _CONTEXT, peer=session.rank, epoch=FIRST_EPOCH, timeout_s=_CHALLENGE_S,
                        encrypted=self._encryption.covers(sock))
            finally:
                self._forget(sock)
            if hello.stream != session.rank or not 0 <= hello.peer < session.size or hello.peer == session.rank:
                raise ProtocolError(f"rank {hello.peer} wants rank {hello.stream}, this is rank {session.rank} of "
                                    f"{session.size}")
            sock = self._sealed(sock, secret, dialled=False)
            taken = self._come(hello.peer, sock, _process_of(sock))
            if not taken:
                sock.send(REFUSED)
        except (BpsError, OSError) as exc:
            self._refuse(exc)
        finally:
            if not taken:
                sock.close()

    def _forget(self, sock: socket.socket) -> None:
        """Count *sock* as unauthenticated no longer: it has proved the key, or is closed."""
        with self._lock:
            was_full = not self._handshakes.has_room
            self._handshakes.remove(sock)
        if was_full:
            self._tell_listening()

    def _refuse(self, why: Exception) -> None:
        self._refusals.note(logging.WARNING, "rank %d refused a connection for messages: %s", self._session.rank, why)

    def _sealed(self, sock: socket.socket, secret: bytes, *, dialled: bool) -> socket.socket:
        """Return the socket to use after the handshake: *sock*, or an encrypted one made of it with *secret*."""
        return EncryptedSocket(sock, seals_of(secret, dialled=dialled)) if self._encryption.covers(sock) else sock

    @property
    def _patience_s(self) -> float:
        return min(self._session.settings.timeout_s, self._session.settings.start_timeout_s)


def _prepare(sock: socket.socket) -> None:
    """Let the kernel send small messages at once, and find out that the other end of an idle connection is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _is_waited_at(listeners: Sequence[socket.socket]) -> bool:
    """Return whether a connection waits to be accepted at one of *listeners*."""
    poller = select.poll()
    for listener in listeners:
        poller.register(listener, select.POLLIN)
    return bool(poller.poll(0))


def _key_of(rank: int) -> str:
    return f"post:{rank}:"


def _process_of(sock: socket.socket) -> int:
    return message_socket.peer_uid(sock)[0] if sock.family == socket.AF_UNIX else 0
