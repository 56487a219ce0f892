"""Netlink queries: the route to an address, and the priority flow control of an interface.

The route is that of ``ip route get``, with policy routing, source address and multipath, which ``/proc/net/route`` does
not show. Flow control is that of ``dcb pfc show``. Neither needs privileges.

References
----------
rtnetlink(7); linux/rtnetlink.h, linux/dcbnl.h (numbers below).
"""
from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_RTM_GETROUTE, _RTM_GETDCB = 26, 78
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PREFSRC = 1, 4, 5, 7
_RTN_LOCAL = 2
_DCB_CMD_IEEE_GET = 21
_DCB_ATTR_IFNAME, _DCB_ATTR_IEEE, _DCB_ATTR_IEEE_PFC = 1, 13, 2
_HEADER = struct.Struct("=IHHII")
_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Route:
    """The route of packets to *destination*: outgoing interface, source address, router."""

    destination: Address
    netdev: str
    source: Address | None = None
    gateway: Address | None = None
    #: whether the destination is an address of this machine
    local: bool = False


def route_to(destination: Address) -> Route:
    """Return the kernel's route to *destination*.

    Raises
    ------
    OSError
        ENETUNREACH or EHOSTUNREACH if there is none, with the address in the text.
    """
    family = socket.AF_INET if destination.version == 4 else socket.AF_INET6
    message = struct.pack("=BBBBBBBBI", family, destination.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
    message += _attribute(_RTA_DST, destination.packed)
    try:
        reply = _ask(_RTM_GETROUTE, message)
    except OSError as exc:
        raise OSError(exc.errno, f"no route to {destination}: {os.strerror(exc.errno or 0)}") from exc
    return parse_route(reply, destination)


def parse_route(reply: bytes, destination: Address) -> Route:
    """Return the route that the body of an RTM_NEWROUTE message describes."""
    found = dict(_attributes(reply[12:]))
    source, gateway = found.get(_RTA_PREFSRC), found.get(_RTA_GATEWAY)
    index = struct.unpack("=I", found[_RTA_OIF])[0] if _RTA_OIF in found else 0
    try:
        netdev = socket.if_indextoname(index)
    except OSError:
        netdev = ""
    return Route(destination, netdev, ipaddress.ip_address(source) if source else None,
                 ipaddress.ip_address(gateway) if gateway else None, local=reply[7] == _RTN_LOCAL)


def pause_priorities(netdev: str) -> tuple[int, ...] | None:
    """Return the priorities with priority flow control enabled; None if the driver does not report them."""
    message = struct.pack("=BBH", 0, _DCB_CMD_IEEE_GET, 0) + _attribute(_DCB_ATTR_IFNAME, netdev.encode() + b"\0")
    try:
        return parse_pause(_ask(_RTM_GETDCB, message))
    except OSError:
        return None


def parse_pause(reply: bytes) -> tuple[int, ...] | None:
    """Return the priorities of the PFC part of an IEEE DCB reply (struct ieee_pfc), None if it has no such part."""
    nested = dict(_attributes(reply[4:])).get(_DCB_ATTR_IEEE, b"")
    pfc = dict(_attributes(nested)).get(_DCB_ATTR_IEEE_PFC)
    return tuple(priority for priority in range(8) if pfc[1] >> priority & 1) if pfc else None


def _ask(kind: int, body: bytes) -> bytes:
    """Send one request and return the body of the answer; raises the kernel's error as OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.bind((0, 0))
        sock.send(_HEADER.pack(_HEADER.size + len(body), kind, _NLM_F_REQUEST, 1, 0) + body)
        reply = sock.recv(65536)
    length, answer, _, _, _ = _HEADER.unpack_from(reply)
    if answer == _NLMSG_ERROR:
        number = -struct.unpack_from("=i", reply, _HEADER.size)[0]
        raise OSError(number, os.strerror(number))
    return reply[_HEADER.size:length]


def _attribute(kind: int, payload: bytes) -> bytes:
    """Return a netlink attribute, padded to four bytes."""
    return struct.pack("=HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind (without its two flag bits) and payload of each attribute."""
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            return
        yield kind & 0x3FFF, data[4:length]
        data = data[(length + 3) & ~3:]
