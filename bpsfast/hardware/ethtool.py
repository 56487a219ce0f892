"""A card's own statistics, as ``ethtool -S`` prints them: the pause frames and discards that /sys does not show.

References
----------
linux/ethtool.h: SIOCETHTOOL with ETHTOOL_GSSET_INFO, ETHTOOL_GSTRINGS and ETHTOOL_GSTATS; needs no privileges.
"""
from __future__ import annotations

import ctypes
import fcntl
import socket
import struct

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
