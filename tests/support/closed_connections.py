"""Whether whom a test talks to as a stranger has hung up."""
from __future__ import annotations

import socket


def is_over(sock: socket.socket) -> bool:
    """Whether the other end of *sock* was closed; what it said before is thrown away."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            continue
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True
