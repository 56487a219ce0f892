"""The loopback address of tests that use real sockets: with BPSFAST_TEST_LOOPBACK=::1 they run over IPv6."""
from __future__ import annotations

import os

LOOPBACK = os.environ.get("BPSFAST_TEST_LOOPBACK", "127.0.0.1")
