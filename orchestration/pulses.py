"""When bytes of each node came last over its connection to a ZeroMQ server, by the kernel's own account."""
from __future__ import annotations

import socket
import struct

from .zmq_connections import view

#: Of `struct tcp_info`: tcpi_last_data_recv, milliseconds.
_LAST_DATA_AT = 52


class ConnectionActivity:
    """Thread: the server's own."""

    def __init__(self) -> None:
        self._connections: dict[bytes, tuple[int, object]] = {}  # by sender: descriptor, and the other end's address
        self._senders: dict[int, bytes] = {}

    def knows(self, sender: bytes, fd: int | None) -> None:
        """Note that a message of *sender* came over the connection *fd*, which is libzmq's; None: it does not say."""
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
        """Return from where *sender* speaks, "host:port"; "an unknown address" if its connection is not known."""
        if sender not in self._connections:
            return "an unknown address"
        address = self._connections[sender][1]
        return "{}:{}".format(*address[:2]) if isinstance(address, tuple) else str(address)

    def silence_s(self, sender: bytes) -> float | None:
        """Return for how long nothing has come of *sender*; None if its connection is not known, or is gone."""
        if sender not in self._connections:
            return None
        fd, address = self._connections[sender]
        try:
            with view(fd) as sock:
                if sock.getpeername() == address:  # else somebody else's by now
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_AT + 4)
                    if len(info) >= _LAST_DATA_AT + 4:
                        return float(struct.unpack_from("=I", info, _LAST_DATA_AT)[0]) / 1e3
        except OSError:
            pass
        del self._connections[sender], self._senders[fd]
        return None
