"""Measures the rate of a node's NIC when the job starts, over the connections to peers (setting nic_probe).

In round r every node exchanges bytes with the node whose index differs in bit r, in both directions at once: no node is
in two exchanges at a time, and about log2(n) rounds reach machines of all kinds. A pair measures the slower of its two
NICs; the best of a node's rounds counts. Nodes on one host share memory and do not measure; nor do nodes with a rate
limit. Python moves these bytes: cards faster than about 20 Gbit/s should report their rate themselves.
"""
from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ...orchestration.messages import NodeInfo
from .peering import Link
from .tcp import PAYLOAD_SHARE, TcpLink, receive

log = logging.getLogger("bpsfast.node")

_DURATION_S = 1.0
#: Share of the duration that is not counted at either end: slow start, and pairs that begin at different moments.
_EDGE_SHARE = 0.25
_CHUNK_NBYTES = 256 << 10
#: Small enough that the queue of a slow link does not overflow, which would slow one direction for most of the time.
_SEND_BUFFER_NBYTES = 64 << 10
_END = (0).to_bytes(8, "little")


def partners(me: NodeInfo, nodes: Sequence[NodeInfo]) -> list[int]:
    """Return the partners of *me* in the order of the rounds; both sides compute the same."""
    found = []
    for bit in range((len(nodes) - 1).bit_length()):
        index = me.index ^ (1 << bit)
        if index >= len(nodes):
            continue
        peer = nodes[index]
        connected = bool(me.ranks or peer.ranks)
        if connected and (me.probes or peer.probes) and not (me.nic_limit_bytes or peer.nic_limit_bytes):
            found.append(index)
    return found


def measure(me: NodeInfo, nodes: Sequence[NodeInfo], links: Mapping[int, Link], deadline: float) -> float:
    """Return bytes per second, including headers, that this node's NIC carries each way; 0: no partner.

    To be called before streams are made of the links, which set their own buffer sizes. Takes until *deadline*
    (monotonic seconds) at most. A link over which the measurement fails is ended, since it is unknown what is still
    under way; it is replaced later if the peer is alive.
    """
    best = 0.0
    for index in partners(me, nodes):
        link = links.get(index)
        if isinstance(link, TcpLink):
            try:
                best = max(best, _exchange([link.sockets[number] for number in sorted(link.sockets)], deadline))
            except OSError as exc:
                log.warning("the NIC could not be measured with node %d (%s): %s", index, nodes[index].host,
                            exc or type(exc).__name__)
                for sock in link.sockets.values():
                    sock.settimeout(None)
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
    return best / PAYLOAD_SHARE


def _exchange(socks: Sequence[socket.socket], deadline: float) -> float:
    """Return the bytes per second of the slower direction; the other end computes the same."""
    for sock in socks:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_NBYTES)  # a stream sets its own
    # Synchronise both ends.
    socks[0].sendall(b"\1")
    receive(socks[0], 1)
    begin = time.monotonic()
    with ThreadPoolExecutor(2 * len(socks), thread_name_prefix="bpsfast-probe") as executor:
        sends = [executor.submit(_send, sock, begin) for sock in socks]
        counts = [executor.submit(_count, sock, begin) for sock in socks]
    for send in sends:
        send.result()
    received = sum(count.result() for count in counts) / (_DURATION_S * (1 - 2 * _EDGE_SHARE))
    socks[0].sendall(int(received).to_bytes(8, "little"))
    theirs = int.from_bytes(receive(socks[0], 8), "little")
    for sock in socks:
        sock.settimeout(None)
    return min(received, float(theirs))


def _send(sock: socket.socket, begin: float) -> None:
    chunk = _CHUNK_NBYTES.to_bytes(8, "little") + bytes(_CHUNK_NBYTES)
    while time.monotonic() < begin + _DURATION_S:
        sock.sendall(chunk)
    sock.sendall(_END)


def _count(sock: socket.socket, begin: float) -> int:
    """Receive until the other end stops; return the bytes that arrive in the middle of the time."""
    first, last = begin + _DURATION_S * _EDGE_SHARE, begin + _DURATION_S * (1 - _EDGE_SHARE)
    view, count = memoryview(bytearray(_CHUNK_NBYTES)), 0
    while left := int.from_bytes(receive(sock, 8), "little"):
        while left:
            n = sock.recv_into(view[:left])
            if n == 0:
                raise ConnectionResetError("the connection ended")
            left -= n
            if first <= time.monotonic() < last:
                count += n
    return count
