"""What is logged of strangers: enough to see that somebody knocks, and not a line for each knock."""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_PAUSE_S = 1.0


class RateLimitedLog:
    """Logs to *log* at most one refusal of each level in a second; the next line says how many there were besides.

    Any thread. *clock* returns monotonic seconds.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._next: dict[int, float] = {}
        self._n_unsaid: dict[int, int] = {}

    def note(self, level: int, text: str, *values: object) -> None:
        """Log *text*, into which *values* are formatted, unless a line of that *level* was logged just now."""
        now = self._clock()
        with self._lock:
            if now < self._next.get(level, now):
                self._n_unsaid[level] = self._n_unsaid.get(level, 0) + 1
                return
            self._next[level] = now + _PAUSE_S
            n_unsaid = self._n_unsaid.pop(level, 0)
        self._log.log(level, text + (" (and %d more since the last such line)" if n_unsaid else ""),
                      *values, *((n_unsaid,) if n_unsaid else ()))
