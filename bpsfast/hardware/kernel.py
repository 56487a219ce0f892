"""Kernel: what system calls and the network say about this machine: addresses, routes, names, driver statistics, pings.

The counterpart of `sysfs.Tree`. Each method asks one question, so a recorded machine can answer from a file.

References
----------
linux/ethtool.h: SIOCETHTOOL with ETHTOOL_GSSET_INFO, ETHTOOL_GSTRINGS and ETHTOOL_GSTATS; needs no privileges.
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
    """This machine. Thread-safe."""

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
        """Return the route to an address; raises OSError if there is none."""
        return netlink.route_to(destination)

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
        """Return the driver's statistics of an interface, as ``ethtool -S`` prints them; see `driver_statistics`."""
        return driver_statistics(netdev)

    def pause_priorities(self, netdev: str) -> tuple[int, ...] | None:
        """Return the priorities with priority flow control, None if the driver does not report them."""
        return netlink.pause_priorities(netdev)

    def ping(self, address: Address, nbytes: int, netdev: str | None = None, timeout_s: float = 1.0) -> ping.PingResult:
        """Send packets of *nbytes* that routers may not fragment; see `ping.ping`."""
        return ping.ping(address, nbytes, netdev, timeout_s)

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


def driver_statistics(netdev: str) -> dict[str, int]:
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


def _ethtool(sock: socket.socket, netdev: str, request: bytes) -> bytes:
    """Return *request* with the fields that the kernel has filled in."""
    buffer = ctypes.create_string_buffer(request, len(request))
    # struct ifreq: the name, then a pointer in a union of 24 bytes
    ifreq = struct.pack("=16sQ16x", netdev.encode()[:15], ctypes.addressof(buffer))
    fcntl.ioctl(sock, _SIOCETHTOOL, ifreq)
    return buffer.raw
