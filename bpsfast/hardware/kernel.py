"""What only a system call or the network tells about this machine: addresses, routes, names, statistics, pings.

The counterpart of `sysfs.Tree`. Everything here is one question each, so a recorded machine answers from a file.
"""
from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

import psutil

from . import netlink, ping
from .netlink import Address, Route

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


class Kernel:
    """This machine. Any thread."""

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
        """Return the route to an address; OSError in words if there is none."""
        return netlink.route_to(destination)

    def resolve(self, host: str) -> list[Address]:
        """Return the addresses of a host name, IPv4 first; OSError in words if it has none."""
        try:
            found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
        except (OSError, UnicodeError) as exc:  # UnicodeError: no name at all, a label is empty or too long
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise OSError(errno.EADDRNOTAVAIL, f"host name {host!r} cannot be resolved: {why}") from exc
        unique = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}
        return sorted(unique, key=lambda address: (address.version, address.packed))

    def shm_nbytes(self) -> int | None:
        """Return the size of /dev/shm in bytes, None if it is not there."""
        try:
            found = os.statvfs("/dev/shm")
        except OSError:
            return None
        return found.f_frsize * found.f_blocks

    def statistics(self, netdev: str) -> dict[str, int]:
        """Return the driver's own statistics of an interface."""
        return statistics(netdev)

    def pause_priorities(self, netdev: str) -> tuple[int, ...] | None:
        """Return the priorities with priority flow control, None if the driver does not say."""
        return netlink.pause_priorities(netdev)

    def ping(self, address: Address, nbytes: int, netdev: str | None = None, timeout_s: float = 1.0) -> ping.PingResult:
        """Send packets of *nbytes* that no router may split; see `echo.ping`."""
        return ping.ping(address, nbytes, netdev, timeout_s)

    def connect(self, address: Address, port: int, timeout_s: float = 1.0) -> str:
        """Try a TCP connection; return "open", "refused" (nobody listens, but nothing is in between) or a reason."""
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
    if entry.family == socket.AF_INET6:  # psutil gives the mask as an address; some versions leave it out
        length = bin(int(ipaddress.IPv6Address(entry.netmask))).count("1") if entry.netmask else 128
        return ipaddress.ip_interface(f"{address}/{length}")
    return ipaddress.ip_interface(f"{address}/{entry.netmask or 32}")


_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37
_SET_STATISTICS = 1
_NAME_NBYTES = 32


def statistics(netdev: str) -> dict[str, int]:
    """Return the statistics of an interface by name; empty if its driver has none or the interface is gone."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            info = _call(sock, netdev, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SET_STATISTICS, 0))
            _, _, known, count = struct.unpack("=IIQI", info)
            if not known or not count:
                return {}
            head = struct.pack("=III", _GSTRINGS, _SET_STATISTICS, count)
            names = _call(sock, netdev, head + bytes(_NAME_NBYTES * count))[len(head):]
            head = struct.pack("=II", _GSTATS, count)
            values = _call(sock, netdev, head + bytes(8 * count))[len(head):]
    except OSError:
        return {}
    texts = [names[i * _NAME_NBYTES:(i + 1) * _NAME_NBYTES].split(b"\0")[0].decode("ascii", "replace").strip()
             for i in range(count)]
    return dict(zip(texts, struct.unpack(f"={count}Q", values)))


def _call(sock: socket.socket, netdev: str, request: bytes) -> bytes:
    """Return *request* as the kernel filled it in."""
    buffer = ctypes.create_string_buffer(request, len(request))
    # struct ifreq: the name, then a pointer in a union of 24 bytes
    ifreq = struct.pack("=16sQ16x", netdev.encode()[:15], ctypes.addressof(buffer))
    fcntl.ioctl(sock, _SIOCETHTOOL, ifreq)
    return buffer.raw
