"""Watches the TCP connections of a ZeroMQ server: limits those that have not proved the key; tells when bytes came.

libzmq lets everybody connect, and reads a handshake's message of up to ZMQ_MAXMSGSIZE, the size of our longest message.
A client without the key could so make it hold that much for any number of connections. A real handshake has less than a
kilobyte, so a connection that has sent much more is cut off. If there are too many, `HandshakeLimiter` chooses which.
"""
from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import termios
import time
from collections.abc import Iterator
from typing import Any

import zmq

from .handshakes import HandshakeLimiter, host_of
from .host_lookup import format_address

#: libzmq closes a connection that has not proved the key after this time.
HANDSHAKE_MS = 5000
#: The most bytes of a connection before its first message is read: the handshake, a `Join`, heartbeats.
PENDING_MAX_NBYTES = 256 << 10
#: The most connections in a handshake at a time, beside those of members. A member that is cut off connects again by
#: itself; but if all come at once, and do not fit, they push each other out again and again.
MAX_PENDING_HANDSHAKES = 256
#: Interval of looks at how much strangers have sent: a thousand may connect at once, and a look is a few system calls.
_LOOK_S = 0.05
#: The most members that are counted: a stranger may have `PENDING_MAX_NBYTES` in place of each.
_MOST_MEMBERS = 4096

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
#: Of `struct tcp_info`: tcpi_bytes_received, since Linux 4.1.
_BYTES_RECEIVED_AT = 128


class ZmqHandshakeLimiter:
    """Watches the connections of *server*, a TCP socket that is not bound yet. Thread: the server's own.

    *n_members*: how many may connect at the same time. Poll `monitor` beside the server; call `note_message` with every
    message's frame, then `update` once all are read.
    """

    def __init__(self, server: zmq.Socket[bytes], n_members: int = 0) -> None:
        most = MAX_PENDING_HANDSHAKES + min(n_members, _MOST_MEMBERS)
        server.handshake_ivl = HANDSHAKE_MS
        server.backlog = most  # the kernel takes its own limit, net.core.somaxconn, if that is less
        self.monitor = server.get_monitor_socket(_EVENTS)
        self.n_cut = 0
        self._server = server
        self._strangers: dict[int, Any] = {}  # descriptor -> the other end's address, which tells whose it is
        self._limiter: HandshakeLimiter[int] = HandshakeLimiter(most, grace_s=0.0)
        self._known: set[int] = set()
        self._lacks_descriptors = False
        self._next_look = 0.0

    @property
    def n_strangers(self) -> int:
        """The number of connections that have sent nothing under the key, as of the last `update`."""
        return len(self._strangers)

    @property
    def n_known(self) -> int:
        """The number of connections that have sent a message, and whose end `update` has not seen."""
        return len(self._known)

    def note_message(self, frame: zmq.Frame) -> int | None:
        """Note that *frame*, received without a copy, came over a connection, which has proved the key.

        Returns the connection's descriptor, which belongs to libzmq; None if it is not known.
        """
        try:
            fd = int(frame.get(zmq.SRCFD))
        except (zmq.ZMQError, KeyError):  # a libzmq that does not tell: then no connection is cut off
            self._lacks_descriptors = True
            return None
        if fd not in self._known:
            self._read_events()  # its connection was reported before its first message could be read
            if self._forget(fd):  # else it has ended, and left this unread
                self._known.add(fd)
        return fd

    def update(self) -> None:
        """Take note of new and closed connections; cut off those beyond the limits."""
        self._read_events()
        if self._lacks_descriptors:
            return
        now = time.monotonic()
        while (surplus := self._limiter.one_to_go(now)) is not None:
            self._cut_off(surplus)
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        excessive = [fd for fd in self._limiter if self._has_sent_too_much(fd)]
        # What libzmq has read of a member begins with a message for us; on a busy machine it is not there yet.
        if excessive and not int(self._server.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            for fd in excessive:
                self._cut_off(fd)

    def close(self) -> None:
        """Stop watching. Call before the server is closed. Idempotent."""
        if not self.monitor.closed:
            self._server.disable_monitor()
            self.monitor.close(linger=0)

    def _read_events(self) -> None:
        while self.monitor.poll(0):
            event, fd = monitor_event(self.monitor)
            self._forget(fd)
            self._known.discard(fd)
            if event == zmq.EVENT_ACCEPTED:
                with contextlib.suppress(OSError), view(fd) as sock:
                    if sock.family not in (socket.AF_INET, socket.AF_INET6):  # the connection is closed again, and
                        continue  # its descriptor another one's
                    self._strangers[fd] = address = sock.getpeername()
                    self._limiter.add(fd, host_of(address[0]), time.monotonic())

    def _forget(self, fd: int) -> bool:
        """Stop counting *fd* as a stranger; return whether it was one."""
        return self._strangers.pop(fd, None) is not None and self._limiter.remove(fd)

    def _has_sent_too_much(self, fd: int) -> bool:
        """Whether libzmq has read more of *fd* than a handshake; also if it is gone, which a later event tells."""
        try:
            with view(fd) as sock:
                return sock.getpeername() == self._strangers[fd] and _nbytes_taken(sock) > PENDING_MAX_NBYTES
        except OSError:
            return True

    def _cut_off(self, fd: int) -> None:
        with contextlib.suppress(OSError), view(fd) as sock:
            # Another one may have that descriptor by now. Should it get it after this line, a newcomer is cut off, who
            # connects again.
            if sock.getpeername() == self._strangers[fd]:
                sock.shutdown(socket.SHUT_RDWR)
                self.n_cut += 1
        self._forget(fd)


def monitor_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Return the next event of *monitor*, which has one, and its value (libzmq's manual, zmq_socket_monitor).

    As `zmq.utils.monitor`, which imports asyncio: that is a tenth of the time in which a node starts.
    """
    frames = monitor.recv_multipart(zmq.NOBLOCK)
    event, value = struct.unpack("=Hi", frames[0])
    return event, value


def interface(host: str) -> str:
    """Return where to bind for peers that connect to *host*: that address alone if this machine has it, else "*".

    In brackets if it is of IPv6. A name says nothing: other machines may know another address by it.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return "*"
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def view(fd: int) -> Iterator[socket.socket]:
    """Look at the connection *fd*, which stays libzmq's; raises OSError if there is none. Needs no free descriptor."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def _nbytes_taken(sock: socket.socket) -> int:
    """Return how many bytes were read of *sock*: those that came, but for those that still lie in the kernel."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
    if len(info) < _BYTES_RECEIVED_AT + 8:
        return 0
    waiting = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0]
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0]) - waiting


#: Of `struct tcp_info`: tcpi_last_data_recv, milliseconds.
_LAST_DATA_AT = 52


class ConnectionActivity:
    """When bytes of each node last came over its connection, by the kernel's count. Thread: the server's own."""

    def __init__(self) -> None:
        self._connections: dict[bytes, tuple[int, object]] = {}  # by sender: descriptor, and the other end's address
        self._senders: dict[int, bytes] = {}

    def note_message(self, sender: bytes, fd: int | None) -> None:
        """Note that a message of *sender* came over the descriptor *fd*, which belongs to libzmq; None: not known."""
        if fd is None or self._senders.get(fd) == sender:
            return
        before = self._senders.pop(fd, None)
        if before is not None:
            self._connections.pop(before, None)
        try:
            with view(fd) as sock:
                address = sock.getpeername()
        except OSError:  # it is gone already
            return
        replaced = self._connections.get(sender)
        if replaced is not None:
            self._senders.pop(replaced[0], None)
        self._connections[sender], self._senders[fd] = (fd, address), sender

    def address(self, sender: bytes) -> str:
        """Return the address of *sender*, "host:port"; "an unknown address" if its connection is not known."""
        if sender not in self._connections:
            return "an unknown address"
        address = self._connections[sender][1]
        if not isinstance(address, tuple):
            return str(address)
        host, port = address[:2]
        if "." in host:
            host = host.removeprefix("::ffff:")  # of IPv4, at a socket of both versions
        return format_address(host, port)

    def silence_s(self, sender: bytes) -> float | None:
        """Return the time since the last byte of *sender*; None if its connection is not known, or gone."""
        if sender not in self._connections:
            return None
        fd, address = self._connections[sender]
        try:
            with view(fd) as sock:
                if sock.getpeername() == address:  # else the descriptor is another connection's by now
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_AT + 4)
                    if len(info) >= _LAST_DATA_AT + 4:
                        return float(struct.unpack_from("=I", info, _LAST_DATA_AT)[0]) / 1e3
        except OSError:
            pass
        del self._connections[sender], self._senders[fd]
        return None
