"""Asks the kernel and the network about this machine: addresses, routes, names, driver statistics, pings.

The counterpart of `sysfs.Tree`. Each method of `Kernel` asks one question, so that a recorded machine can answer it.

Routes are those of ``ip route get``, with policy routing, source address and multipath, which ``/proc/net/route`` does
not show. Priority flow control is that of ``dcb pfc show``, driver statistics are those of ``ethtool -S``. All without
privileges. Pings are ICMP echo requests that routers may not fragment; they test a path's MTU without a program at the
peer, and need ``net.ipv4.ping_group_range`` to include the user's group (the default of most distributions), or root.

References
----------
rtnetlink(7); linux/rtnetlink.h, linux/dcbnl.h, linux/ethtool.h (SIOCETHTOOL with ETHTOOL_GSSET_INFO, ETHTOOL_GSTRINGS
and ETHTOOL_GSTATS); RFC 792 and 4443 (echo); RFC 4821 (a lost probe of a large size, where small ones pass, means a
smaller path MTU); ip(7): IP_MTU_DISCOVER, IP_PMTUDISC_PROBE.
"""
from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

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


def parse_pause(reply: bytes) -> tuple[int, ...] | None:
    """Return the priorities of the PFC part of an IEEE DCB reply (struct ieee_pfc), None if it has no such part."""
    nested = dict(_attributes(reply[4:])).get(_DCB_ATTR_IEEE, b"")
    pfc = dict(_attributes(nested)).get(_DCB_ATTR_IEEE_PFC)
    return tuple(priority for priority in range(8) if pfc[1] >> priority & 1) if pfc else None


def _netlink_request(kind: int, body: bytes) -> bytes:
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


Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


class Kernel:
    """The kernel of this machine: each method asks it one question. Thread-safe."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment's variables."""
        return os.environ

    def addresses(self) -> dict[str, list[Interface]]:
        """Return the addresses of every interface, with their networks, IPv4 first."""
        return {netdev: sorted((_interface(each) for each in found if each.family in (socket.AF_INET, socket.AF_INET6)),
                               key=lambda interface: interface.version)
                for netdev, found in psutil.net_if_addrs().items()}

    def route(self, destination: Address) -> Route:
        """Return the kernel's route to *destination*.

        Raises `OSError` with ENETUNREACH or EHOSTUNREACH if there is none; the text has the address.
        """
        family = socket.AF_INET if destination.version == 4 else socket.AF_INET6
        message = struct.pack("=BBBBBBBBI", family, destination.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
        message += _attribute(_RTA_DST, destination.packed)
        try:
            reply = _netlink_request(_RTM_GETROUTE, message)
        except OSError as exc:
            raise OSError(exc.errno, f"no route to {destination}: {os.strerror(exc.errno or 0)}") from exc
        return parse_route(reply, destination)

    def resolve(self, host: str) -> list[Address]:
        """Return the addresses of a host name, IPv4 first; raises OSError if it has none."""
        try:
            found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
        except (OSError, UnicodeError) as exc:  # UnicodeError: a label is empty or too long
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise OSError(errno.EADDRNOTAVAIL, f"host name {host!r} cannot be resolved: {why}") from exc
        unique = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}
        return sorted(unique, key=lambda address: (address.version, address.packed))

    def shm_nbytes(self) -> int | None:
        """Return the size of /dev/shm in bytes, None if it does not exist."""
        try:
            found = os.statvfs("/dev/shm")
        except OSError:
            return None
        return found.f_frsize * found.f_blocks

    def statistics(self, netdev: str) -> dict[str, int]:
        """Return the driver's statistics of an interface by name; empty if there are none or no such interface.

        They include pause frames and discards, which sysfs does not show.
        """
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                info = _ethtool(sock, netdev, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SET_STATISTICS, 0))
                _, _, known, count = struct.unpack("=IIQI", info)
                if not known or not count:
                    return {}
                head = struct.pack("=III", _GSTRINGS, _SET_STATISTICS, count)
                names = _ethtool(sock, netdev, head + bytes(_NAME_NBYTES * count))[len(head):]
                head = struct.pack("=II", _GSTATS, count)
                values = _ethtool(sock, netdev, head + bytes(8 * count))[len(head):]
        except OSError:
            return {}
        texts = [names[i * _NAME_NBYTES:(i + 1) * _NAME_NBYTES].split(b"\0")[0].decode("ascii", "replace").strip()
                 for i in range(count)]
        return dict(zip(texts, struct.unpack(f"={count}Q", values)))

    def pause_priorities(self, netdev: str) -> tuple[int, ...] | None:
        """Return the priorities with priority flow control enabled; None if the driver does not report them."""
        message = struct.pack("=BBH", 0, _DCB_CMD_IEEE_GET, 0) + _attribute(_DCB_ATTR_IFNAME, netdev.encode() + b"\0")
        try:
            return parse_pause(_netlink_request(_RTM_GETDCB, message))
        except OSError:
            return None

    def ping(self, address: Address, nbytes: int, netdev: str | None = None, timeout_s: float = 1.0) -> PingResult:
        """Send up to three echo requests of *nbytes* (whole IP packets) to *address*, over *netdev* if given.

        Raises `OSError` if the kernel refuses, for example because there is no route.
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

    def connect(self, address: Address, port: int, timeout_s: float = 1.0) -> str:
        """Try a TCP connection; return "open", "refused" (the host answers, but nothing listens) or an error text."""
        try:
            socket.create_connection((str(address), port), timeout_s).close()
        except ConnectionRefusedError:
            return "refused"
        except TimeoutError:
            return "no answer"
        except OSError as exc:
            return exc.strerror or str(exc)
        return "open"


def _interface(entry: Any) -> Interface:
    address = entry.address.partition("%")[0]
    if entry.family == socket.AF_INET6:  # psutil gives the mask as an address; some versions omit it
        length = bin(int(ipaddress.IPv6Address(entry.netmask))).count("1") if entry.netmask else 128
        return ipaddress.ip_interface(f"{address}/{length}")
    return ipaddress.ip_interface(f"{address}/{entry.netmask or 32}")


_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37
_SET_STATISTICS = 1
_NAME_NBYTES = 32


def _ethtool(sock: socket.socket, netdev: str, request: bytes) -> bytes:
    """Return *request* with the fields that the kernel has filled in."""
    buffer = ctypes.create_string_buffer(request, len(request))
    # struct ifreq: the name, then a pointer in a union of 24 bytes
    ifreq = struct.pack("=16sQ16x", netdev.encode()[:15], ctypes.addressof(buffer))
    fcntl.ioctl(sock, _SIOCETHTOOL, ifreq)
    return buffer.raw


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
