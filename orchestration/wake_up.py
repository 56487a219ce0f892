"""Wakes a thread that polls descriptors, by an eventfd that any thread may ring, even after it was closed."""
from __future__ import annotations

import contextlib
import os
import threading


class WakeUp:
    """A descriptor to poll. Call `ring` from any thread or signal handler, the rest from the thread that polls."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the number of a closed descriptor may be another one's
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor; -1 once it is closed."""
        return self._fd

    def ring(self) -> None:
        """Make it readable. Does nothing once it is closed."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make it not readable."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close it. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)
