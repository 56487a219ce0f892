"""Receives messages of a control-plane line in a test."""
from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 20.0


def look(line: Any, is_enough: Callable[[list[Any]], bool]) -> list[Any]:
    """Receive messages until *is_enough* accepts them; return them."""
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
    """Return the next *n* messages; fail if there are more."""
    received = look(line, lambda found: len(found) >= n)
    assert len(received) == n, received
    return received
