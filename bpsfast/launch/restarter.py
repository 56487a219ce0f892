"""A daemon that a signal has ended is started again, while the process that started it lives."""
from __future__ import annotations

import logging
import os
import select
import subprocess
import threading
from collections.abc import Callable

_log = logging.getLogger("bpsfast.daemons")

#: What ends more often than this has a reason that goes on.
N_RESTARTS = 3


class Restarter:
    """Keeps one daemon, in a thread of its own, until `stop`. Any thread.

    Parameters
    ----------
    name
        What it is called in the log.
    start
        Starts it, now and whenever a signal has ended it, but `N_RESTARTS` times at most after the first. An exit is
        its own decision.
    describe
        Says in words how a process has ended (`daemons.describe_exit`).
    """

    def __init__(self, name: str, start: Callable[[], subprocess.Popen], describe: Callable[[int], str]) -> None:
        self._name, self._start, self._describe = name, start, describe
        self._lock = threading.Lock()
        self._n_restarts = 0
        self._stopped = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._process = start()
        except OSError:
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._watch, name="bpsfast-keeper", daemon=True)
        self._thread.start()

    @property
    def process(self) -> subprocess.Popen:
        """The process that runs now, or has ended for good."""
        with self._lock:
            return self._process

    @property
    def returns(self) -> bool:
        """Whether the process is started again should a signal have ended it."""
        with self._lock:
            return not self._stopped and self._n_restarts < N_RESTARTS

    def stop(self) -> None:
        """Start it no more. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _watch(self) -> None:
        while True:
            process = self.process
            if not self._has_ended(process):
                return
            code = process.wait()
            with self._lock:
                if code >= 0 or self._stopped or self._n_restarts == N_RESTARTS:
                    return
                self._n_restarts += 1
                _log.warning("the %s (pid %d) %s: it is started again (%d of %d times)", self._name, process.pid,
                             self._describe(code), self._n_restarts, N_RESTARTS)
                try:
                    self._process = self._start()
                except OSError as exc:
                    self._n_restarts = N_RESTARTS
                    _log.error("the %s cannot be started again: %s", self._name, exc)
                    return

    def _has_ended(self, process: subprocess.Popen) -> bool:
        """Wait for the end of *process*; False if `stop` was called first."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # somebody has waited for it already
            return True
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.register(self._wake, select.POLLIN)
            return self._wake not in dict(poll.poll())
        finally:
            os.close(pidfd)
