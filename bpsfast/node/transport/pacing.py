"""The rate that all tcp connections of a node keep together, in each direction (setting nic_limit).

Outgoing, a sending thread waits for its turn before each piece; incoming, a receiving thread does, and as its socket
then holds little, the peer's kernel soon has to wait as well. A network card that writes by itself (RDMA) keeps to
nobody's rate.
"""
from __future__ import annotations

import contextlib
import socket

from ...base.settings import Settings
from ...pyx.pace import Pace

#: What is left for gradients of a link's bytes: headers of Ethernet, IP and TCP (1448 of 1514), acknowledgements of the
#: other direction (one for every second packet).
PAYLOAD_SHARE = 0.93
#: What may arrive before a receiver has had its turn, of all connections together.
_SLACK_S = 0.004
_LEAST_BUFFER_NBYTES = 64 << 10
#: socket.SO_MAX_PACING_RATE, which Python does not name; bytes/s, 32 bits.
_SO_MAX_PACING_RATE = 47
_MOST_PACING_RATE = (1 << 32) - 2


class TcpPacing:
    """One pace for each direction, shared by *n_connections* connections. Must outlive their streams.

    *rate_bytes*: bytes per second on the wire, headers included.
    """

    def __init__(self, rate_bytes: float, n_connections: int) -> None:
        self.out = Pace(rate_bytes * PAYLOAD_SHARE)
        self.incoming = Pace(rate_bytes * PAYLOAD_SHARE)
        self._rate_bytes = rate_bytes
        self._buffer_nbytes = max(_LEAST_BUFFER_NBYTES, int(rate_bytes * _SLACK_S / max(1, n_connections)))

    def prepare(self, sock: socket.socket) -> None:
        """Let *sock* hold little that arrives, and send pieces evenly where the kernel can."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_nbytes)
        if self._rate_bytes < _MOST_PACING_RATE:
            with contextlib.suppress(OSError):  # it only smooths: the total is kept without it
                sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(self._rate_bytes))


def of(settings: Settings, n_peers: int) -> TcpPacing | None:
    """Return the paces of a node with *n_peers* peers, None without a limit."""
    if not settings.nic_limit:
        return None
    return TcpPacing(settings.nic_limit * 1e9 / 8, n_peers * settings.tcp_streams)
