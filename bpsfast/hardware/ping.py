"""ICMP echo requests that routers may not fragment: they test a path's MTU without a program at the peer.

They need ``net.ipv4.ping_group_range`` to include the user's group (the default of most distributions), or root.

References
----------
RFC 792 and 4443 (echo); RFC 4821 (a lost probe of a large size, where small ones pass, means a smaller path MTU);
ip(7): IP_MTU_DISCOVER, IP_PMTUDISC_PROBE.
"""
from __future__ import annotations

import enum
import errno
import os
import socket
import struct
import time

from .netlink import Address

# not in the socket module
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_IPV6_DONTFRAG = 62
_ICMP_HEADER = struct.Struct("!BBHHH")
_TRIES = 3


class PingResult(enum.Enum):
    """The result of `ping`."""

    ANSWERED = "answered"
    TOO_BIG = "larger than the interface's MTU"
    SILENT = "no answer"
    FORBIDDEN = "not allowed to send pings here"


def header_nbytes(address: Address) -> int:
    """Return the bytes of the IP and ICMP headers. The smallest packet that `ping` sends is 8 bytes larger."""
    return (20 if address.version == 4 else 40) + _ICMP_HEADER.size


def ping(address: Address, nbytes: int, netdev: str | None = None, timeout_s: float = 1.0) -> PingResult:
    """Send up to three echo requests of *nbytes* (whole IP packets) to *address*, over *netdev* if given.

    Raises
    ------
    OSError
        The kernel refuses, for example because there is no route.
    """
    token = os.urandom(8)
    payload = token.ljust(max(8, nbytes - header_nbytes(address)), b"\0")
    try:
        sock = _open(address)
    except PermissionError:
        return PingResult.FORBIDDEN
    with sock:
        try:
            _forbid_fragments(sock, address)
            if netdev is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, netdev.encode())
            sock.settimeout(timeout_s / _TRIES)
            for number in range(_TRIES):
                sock.sendto(_request(address, number, payload), (str(address), 0))
                if _answered(sock, address, token, timeout_s / _TRIES):
                    return PingResult.ANSWERED
        except PermissionError:
            return PingResult.FORBIDDEN
        except OSError as exc:
            if exc.errno == errno.EMSGSIZE:
                return PingResult.TOO_BIG
            raise
    return PingResult.SILENT


def _open(address: Address) -> socket.socket:
    family, protocol = ((socket.AF_INET, socket.IPPROTO_ICMP) if address.version == 4
                        else (socket.AF_INET6, socket.IPPROTO_ICMPV6))
    try:
        return socket.socket(family, socket.SOCK_DGRAM, protocol)
    except PermissionError:
        return socket.socket(family, socket.SOCK_RAW, protocol)


def _forbid_fragments(sock: socket.socket, address: Address) -> None:
    if address.version == 4:
        sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
    else:
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_DONTFRAG, 1)


def _request(address: Address, number: int, payload: bytes) -> bytes:
    kind, identity = (8 if address.version == 4 else 128), os.getpid() & 0xFFFF
    bare = _ICMP_HEADER.pack(kind, 0, 0, identity, number) + payload
    return _ICMP_HEADER.pack(kind, 0, _checksum(bare), identity, number) + payload


def _checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071). The kernel replaces it for ICMPv6."""
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _answered(sock: socket.socket, address: Address, token: bytes, timeout_s: float) -> bool:
    """Wait for the reply with *token*. A raw socket also receives other programs' packets and our own request."""
    deadline = time.monotonic() + timeout_s
    reply = 0 if address.version == 4 else 129
    while (left := deadline - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            data = sock.recv(65536)
        except TimeoutError:
            return False
        if sock.type == socket.SOCK_RAW and address.version == 4:
            data = data[(data[0] & 0xF) * 4:]  # a raw IPv4 socket delivers the IP header too
        if data[:1] == bytes([reply]) and data[_ICMP_HEADER.size:].startswith(token):
            return True
    return False
