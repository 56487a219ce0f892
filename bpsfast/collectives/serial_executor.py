"""Runs the collective calls of a group of ranks one after another, in the order in which the program made them."""
from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..orchestration.errors import BusyError, ClosedError

Done = Callable[[BaseException | None], None]


class _Job(NamedTuple):
    run: Callable[[], None]
    done: Done


class SerialExecutor:
    """Runs jobs in order, one at a time. Any thread.

    The first job that its caller does not wait for starts a thread; another one is started when a job is due and all
    threads are inside ``done``: a callback on a future may make further calls and wait for them. A job that its caller
    waits for is run in the caller's thread if it is its turn, because a woken thread waits for the interpreter first.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._running = False
        self._thread = 0  # in which a job runs
        self._closing = False
        #: Whether no job waits or runs, and jobs are accepted.
        self.is_idle = True
        self._threads: list[threading.Thread] = []
        self._n_in_done = 0  # threads inside ``done``

    def run(self, job: Callable[[], None], done: Done, inline: bool) -> None:
        """Run *job* when it is its turn, then ``done(error)`` (None: no error).

        *inline*: in this thread, if that is now. Raises `ClosedError` after `close`, and in a fork of the process that
        made this; `BusyError` inside a job.
        """
        if os.getpid() != self._pid:
            raise ClosedError(f"{self._name} belongs to process {self._pid}; this is a fork of it")
        if self._thread == threading.get_ident():
            raise BusyError(f"{self._name} is called inside another call of it, as by a signal handler; let the "
                            "handler set a flag, and make the call after that one")
        with self._condition:
            if self._closing:
                raise ClosedError(f"{self._name} is closed")
            here = inline and not self._running and not self._jobs
            self.is_idle = False
            if here:
                self._thread = threading.get_ident()  # first: a signal handler may run in between
                self._running = True
            else:
                self._jobs.append(_Job(job, done))
                self._wake_or_start()
        if here:
            self._execute(_Job(job, done))

    def close(self, timeout_s: float) -> bool:
        """Accept no more jobs, wait for those that were given, and end the threads; return whether all have ended.

        Close first what a stuck job waits for, so that it fails. Does nothing in a fork.
        """
        if os.getpid() != self._pid:
            return True
        with self._condition:
            self._closing, self.is_idle = True, False
            self._condition.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:  # more may be started while jobs are left
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread())

    def _wake_or_start(self) -> None:
        """Wake a thread for the waiting jobs, or start one; under the lock."""
        if self._jobs and self._n_in_done == len(self._threads):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        else:
            self._condition.notify()

    def _work(self) -> None:
        while True:
            with self._condition:
                while self._running or not self._jobs:
                    if self._closing and not self._jobs:
                        self._condition.notify()  # wake the next one, which may have missed its notification
                        return
                    self._condition.wait()
                self._thread, self._running = threading.get_ident(), True
                job = self._jobs.popleft()
            self._execute(job, is_own=True)
            del job  # release what it holds before the next one comes

    def _execute(self, job: _Job, is_own: bool = False) -> None:
        error: BaseException | None = None
        try:
            job.run()
        except BaseException as exc:
            error = exc
        finally:  # also after an interrupt: other jobs must run, and the caller must be told
            with self._condition:
                self._running, self._thread = False, 0
                self.is_idle = not self._jobs and not self._closing
                self._n_in_done += is_own
                self._wake_or_start()
        try:
            job.done(error)
        finally:
            with self._condition:
                self._n_in_done -= is_own
