"""Limits connections that have not proved the job's key, and runs the handshakes of a listening socket.

All listening sockets have one policy (`HandshakeLimiter`): few connections in a handshake at a time, each with a
deadline; when one more comes, the oldest of the source with the most is cut off. So a flood from one host cuts off its
own connections, never that of a member on another host.
"""
from __future__ import annotations

import contextlib
import errno
import ipaddress
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from .errors import BpsError
from .wake_up import WakeUp

#: The default limit of connections in a handshake.
MAX_PENDING_HANDSHAKES = 64
#: A connection is not cut off sooner than this: a member on a busy machine may need it. A tenth of it, if its source
#: has more than half of all places and more connections than the job has members.
GRACE_S = 1.0

#: Time to wait when descriptors or memory are exhausted.
_EXHAUSTED_PAUSE_S = 0.2
#: TCP keepalive of connections between ranks, which may be idle for hours: the kernel probes the other end after this
#: time, at this interval, and ends the connection after this many probes without an answer. For a process that is
#: stopped (SIGSTOP) its kernel answers.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 15, 5, 3
#: Interval of checks whether there is room for one more.
RECHECK_S = 0.02
#: Time that `HandshakeAcceptor.close` waits for a thread that is in a system call.
_JOIN_S = 1.0
#: Bytes to drain before closing a refused connection: unread ones would turn the close into a reset.
_DRAIN_NBYTES = 1 << 16
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
#: Errors of `accept` for a connection that ended before it was accepted (accept(2)).
_OVER = (errno.ECONNABORTED, errno.EAGAIN, errno.EPERM, errno.EPROTO, errno.ENETDOWN, errno.ENETUNREACH,
         errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOPROTOOPT, errno.ENONET, errno.EOPNOTSUPP, errno.ETIMEDOUT)

#: Errors of `accept` for a listener that was shut down.
_SHUT = (errno.EBADF, errno.EINVAL)

Connection = TypeVar("Connection", bound=Hashable)
Proof = TypeVar("Proof")


class HandshakeLimiter(Generic[Connection]):
    """At most *most* connections without a proof, in the order of arrival. Not thread-safe, no I/O.

    *now* is any monotonic clock, in seconds. *n_members*: connections that the job itself may open at once. *grace_s*:
    see `GRACE_S`; 0 where connections count only once they are established and reconnect by themselves.
    """

    def __init__(self, most: int = MAX_PENDING_HANDSHAKES, n_members: int = 0, grace_s: float = GRACE_S) -> None:
        self.most = most
        self._many = max(most / 2, n_members)
        self._grace_s = grace_s
        self._held: dict[Connection, tuple[str, float]] = {}
        self._n_of: Counter[str] = Counter()  # connections by source

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, connection: object) -> bool:
        return connection in self._held

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._held))

    @property
    def has_room(self) -> bool:
        """Whether one more may come."""
        return len(self._held) < self.most

    def add(self, connection: Connection, source: str, now: float) -> None:
        """Count *connection*, which comes from *source* (see `source_of`)."""
        self.remove(connection)
        self._held[connection] = source, now
        self._n_of[source] += 1

    def remove(self, connection: Connection) -> bool:
        """Stop counting *connection*, which has proved the key or has ended. Returns whether it was counted."""
        found = self._held.pop(connection, None)
        if found is not None:
            self._n_of[found[0]] -= 1
            if not self._n_of[found[0]]:
                del self._n_of[found[0]]
        return found is not None

    def overdue(self, now: float, patience_s: float) -> list[Connection]:
        """Return the connections that have not proved the key within *patience_s*."""
        return [connection for connection, (_, since) in self._held.items() if now - since >= patience_s]

    def one_to_go(self, now: float) -> Connection | None:
        """Return the connection to cut off to make room for another; None if there is room, or none may be cut off yet.

        It is the oldest one of the source with the most; of two such sources, of the one whose oldest came first.
        """
        if self.has_room:
            return None
        n_most = max(self._n_of.values())
        connection, since = next((each, since) for each, (source, since) in self._held.items()
                                 if self._n_of[source] == n_most)
        grace_s = self._grace_s / 10 if n_most > self._many else self._grace_s
        return connection if now - since >= grace_s else None


def source_of(sock: socket.socket) -> str:
    """Return where the other end of *sock* is, for `HandshakeLimiter.add`; "" if it is gone.

    That is the host's address; of IPv6 its /64 network, all addresses of which a host may have; of a local socket the
    process.
    """
    try:
        if sock.family == socket.AF_UNIX:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return f"process {struct.unpack('3i', credentials)[0]}"
        return host_of(sock.getpeername()[0])
    except OSError:
        return ""


def host_of(address: str) -> str:
    """Return *address*; of IPv6 its /64 network; an IPv4 address mapped into IPv6 as IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))


class HandshakeAcceptor(Generic[Proof]):
    """Accepts on *listener*, which it closes, from `start` until `close`, and runs the handshakes.

    Parameters
    ----------
    prove
        Called with each new socket in a thread of its own: the handshake, with its own deadline. Raises `BpsError` or
        `OSError` to refuse the connection.
    came
        Called with (socket, the result of `prove`) in the same thread; takes over the socket.
    refused
        Called with the error of a connection that is refused; the socket is closed afterwards.
    warn
        Called with a text when connections cannot be accepted for a while, or any more.
    n_members
        Connections that the job itself may open at a time, for which there is room beside `MAX_PENDING_HANDSHAKES`.
    """

    def __init__(self, listener: socket.socket, prove: Callable[[socket.socket], Proof],
                 came: Callable[[socket.socket, Proof], None], refused: Callable[[Exception], None],
                 warn: Callable[[str], None], n_members: int = 0, name: str = "bpsfast-acceptor") -> None:
        self._listener = listener
        self._prove, self._came, self._refused, self._warn = prove, came, refused, warn
        self._name = name
        self._pending: HandshakeLimiter[socket.socket] = HandshakeLimiter(
            MAX_PENDING_HANDSHAKES + n_members, n_members)
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._exhausted = False
        self.is_closed = False
        self._wake = WakeUp()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._thread.start()

    def wait(self) -> None:
        """Return when the listener was shut down or has failed."""
        self._thread.join()

    def close(self) -> None:
        """Accept no more connections, and cut off those in a handshake. Idempotent."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            for sock in self._pending:
                _end(sock)
        self._wake.ring()
        if self._thread.is_alive():
            self._thread.join()
        for thread in tuple(self._threads):
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._wake.close()
        self._listener.close()

    # -- the thread that accepts --------------------------------------------------------------------------

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake.fileno(), select.POLLIN)
        poller.register(self._listener, select.POLLIN)
        while not self.is_closed:
            poller.poll()
            if self.is_closed:
                return
            if not self._make_room():
                self._pause(RECHECK_S)
                continue
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if exc.errno in _EXHAUSTED:
                    self._exhaust(exc)
                elif exc.errno in _SHUT:
                    return
                elif exc.errno not in _OVER:
                    self._warn(f"no connection can be accepted any more: {exc}")
                    return
                continue
            self._start_handshake(sock)

    def _make_room(self) -> bool:
        """Cut off a connection if there are too many; return whether there is room."""
        with self._lock:
            going = self._pending.one_to_go(time.monotonic())
            if going is not None:
                self._pending.remove(going)
                _end(going)  # its thread reports it and closes the socket
            return self._pending.has_room

    def _start_handshake(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._receive, args=(sock,), name=f"{self._name}-handshake", daemon=True)
        with self._lock:
            if self.is_closed:
                sock.close()
                return
            self._pending.add(sock, source_of(sock), time.monotonic())
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
        try:
            thread.start()
        except RuntimeError as exc:  # no thread can be started
            self._forget(sock)
            self._threads.discard(thread)
            sock.close()
            self._exhaust(exc)
        else:
            self._exhausted = False

    def _exhaust(self, exc: Exception) -> None:
        if not self._exhausted:
            self._exhausted = True
            self._warn(f"connections wait, because they cannot be accepted: {exc} (too many open files: see "
                       "ulimit -n)")
        self._pause(_EXHAUSTED_PAUSE_S)

    def _pause(self, duration_s: float) -> None:
        poller = select.poll()
        poller.register(self._wake.fileno(), select.POLLIN)
        poller.poll(1000 * duration_s)

    # -- a thread for each connection ---------------------------------------------------------------------

    def _receive(self, sock: socket.socket) -> None:
        """Run the handshake of one connection, and hand it over or refuse it."""
        try:
            proof = self._prove(sock)
        except (BpsError, OSError) as exc:
            self._forget(sock)
            self._refused(exc)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
                sock.setblocking(False)
                sock.recv(_DRAIN_NBYTES)
            sock.close()
            return
        self._forget(sock)
        if self.is_closed:
            sock.close()
            return
        self._came(sock, proof)

    def _forget(self, sock: socket.socket) -> None:
        """Stop counting the socket, which must not be cut off from here on."""
        with self._lock:
            self._pending.remove(sock)


def _end(sock: socket.socket) -> None:
    """Make the thread that waits for *sock* return; it closes the descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
