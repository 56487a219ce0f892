"""The threads of a group that make its calls one after another, in the order in which the program asked for them."""
from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..orchestration.errors import ClosedError

Done = Callable[[BaseException | None], None]


class _Job(NamedTuple):
    run: Callable[[], None]
    done: Done


class SerialExecutor:
    """Runs jobs in order, one at a time. Any thread; a thread of its own is started by the first job that nobody waits
    for, another one where a job is to be run and all others are inside ``done``: what a program hangs on a future may
    make further calls, and wait for them.

    A job that its caller waits for at once is run in the caller's thread if it is its turn: a thread that is woken
    beside a busy one waits for the interpreter first.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._running = False
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._n_telling = 0  # of them: inside ``done``

    def run(self, job: Callable[[], None], done: Done, inline: bool) -> None:
        """Run *job* when it is its turn, then ``done(error)``, None if it went well; *inline*: here, if that is now.

        Raises
        ------
        ClosedError
            After `close`, and in a fork of the process that made this, which has not its thread.
        """
        if os.getpid() != self._pid:
            raise ClosedError(f"{self._name} belongs to process {self._pid}; this is a fork of it")
        with self._condition:
            if self._closing:
                raise ClosedError(f"{self._name} is closed")
            here = inline and not self._running and not self._jobs
            if here:
                self._running = True
            else:
                self._jobs.append(_Job(job, done))
                self._see_to_jobs()
        if here:
            self._carry_out(_Job(job, done))

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs, let those that are there come to their end, end the threads; whether they have ended.

        What cannot come to its end must be made to fail first, by closing what it waits for. A fork has nothing to end.
        """
        if os.getpid() != self._pid:
            return True
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:  # others may come while jobs are left
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread())

    def _see_to_jobs(self) -> None:
        """Wake a thread for the jobs that wait, or start one; under the lock."""
        if self._jobs and self._n_telling == len(self._threads):
            thread = threading.Thread(target=self._conduct, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        else:
            self._condition.notify()

    def _conduct(self) -> None:
        while True:
            with self._condition:
                while self._running or not self._jobs:
                    if self._closing and not self._jobs:
                        self._condition.notify()  # the next one that waits, if it was woken while there were jobs
                        return
                    self._condition.wait()
                job = self._jobs.popleft()
                self._running = True
            self._carry_out(job, is_own=True)
            del job  # what it holds is not held until the next one comes

    def _carry_out(self, job: _Job, is_own: bool = False) -> None:
        error: BaseException | None = None
        try:
            job.run()
        except BaseException as exc:
            error = exc
        finally:  # whatever interrupts: others must have their turn, and whoever waits must be told
            with self._condition:
                self._running = False
                self._n_telling += is_own
                self._see_to_jobs()
        try:
            job.done(error)
        finally:
            with self._condition:
                self._n_telling -= is_own
