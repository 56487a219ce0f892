"""The loopback address of tests that use real sockets: with BPSTEST_LOOPBACK=::1 they run over IPv6."""
from __future__ import annotations

import os
import socket

import pytest

LOOPBACK = os.environ.get("BPSTEST_LOOPBACK", "127.0.0.1")


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


NEEDS_IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no address ::1 (sysctl disable_ipv6)")
