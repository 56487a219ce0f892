"""The sockets that a process listens on, from /proc, which any user of the machine can read."""
from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import NamedTuple

import psutil


class Listening(NamedTuple):
    """One socket. `kind`: "control" (the scheduler's), "data", "local" or "messages" (a rank's)."""

    kind: str
    owner: str
    family: socket.AddressFamily
    address: tuple[str, int] | str

    def call(self, timeout_s: float) -> socket.socket:
        """Connect; *timeout_s* is also the timeout of the socket. Raises `BlockingIOError` after it, or `OSError`."""
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        try:
            # This also waits for a place in the full queue of a local socket.
            whole, part = divmod(timeout_s, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(part * 1e6)))
            sock.connect(self.address)
            sock.settimeout(timeout_s)
        except BaseException:
            sock.close()
            raise
        return sock


def of(owner: str, pid: int) -> list[Listening]:
    """Return the sockets that *pid* listens on; *owner* is its name in the job ("scheduler", "node 0", "rank 1")."""
    role = owner.partition(" ")[0]
    over_tcp = {"scheduler": "control", "rank": "messages"}.get(role, "data")
    # ZeroMQ listens at IPv4 addresses by IPv6 sockets.
    addresses = [(each.laddr.ip.removeprefix("::ffff:"), each.laddr.port)
                 for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    found = [Listening(over_tcp, owner, socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port))
             for host, port in addresses]
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return found + [Listening("messages" if role == "rank" else "local", owner, socket.AF_UNIX, "\0" + row[7][1:])
                    for row in rows if row[3] == "00010000" and f"socket:[{row[6]}]" in inodes]
