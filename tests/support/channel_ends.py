"""What comes over a line of the control plane, waited for by the test that asks."""
from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 20.0


def look(line: Any, is_enough: Callable[[list[Any]], bool]) -> list[Any]:
    """Wait until *is_enough* says so of what was received; return that."""
    received: list[Any] = []
    wake, until = os.eventfd(0), time.monotonic() + LIMIT_S
    try:
        while not is_enough(received):
            assert time.monotonic() < until, f"{received} within {LIMIT_S} s"
            line.wait(wake, 0.5)
            received += line.recv_nowait()
    finally:
        os.close(wake)
    return received


def receive(line: Any, n: int) -> list[Any]:
    """Return the next *n* messages, and no more."""
    received = look(line, lambda found: len(found) >= n)
    assert len(received) == n, received
    return received
