"""Whether anybody answers at the scheduler's address: what an error about somebody who did not come must add."""
from __future__ import annotations

import socket

from .roles import format_address

_TIMEOUT_S = 2.0


def nobody_at(host: str, port: int) -> str:
    """Return a sentence, with a space before it, if no connection to *host*:*port* can be made; else nothing.

    Port 0: this process does not know it; nothing is said. Blocks for at most two seconds.
    """
    if port == 0:
        return ""
    try:
        with socket.create_connection((host, port), _TIMEOUT_S):
            return ""
    except OSError as exc:
        return (f" Nobody answers at the scheduler's address {format_address(host, port)} ({exc.strerror or exc}): "
                "check BPSFAST_SCHEDULER, and that the scheduler runs there.")
