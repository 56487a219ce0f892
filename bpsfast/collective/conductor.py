"""The thread of a group that makes its calls one after another, in the order in which the program asked for them."""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..orchestration.errors import ClosedError

Done = Callable[[BaseException | None], None]


class _Job(NamedTuple):
    run: Callable[[], None]
    done: Done


class Conductor:
    """Runs jobs in order. Any thread; the thread of its own is started by the first job that nobody waits for.

    A job that its caller waits for at once is run in the caller's thread if it is its turn: a thread that is woken
    beside a busy one waits for the interpreter first.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._running = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[[], None], done: Done, inline: bool) -> None:
        """Run *job* when it is its turn, then ``done(error)``, None if it went well; *inline*: here, if that is now.

        Raises
        ------
        ClosedError
            After `close`.
        """
        with self._condition:
            if self._closing:
                raise ClosedError(f"{self._name} is closed")
            here = inline and not self._running and not self._jobs
            if here:
                self._running = True
            else:
                self._jobs.append(_Job(job, done))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._conduct, name=self._name, daemon=True)
                    self._thread.start()
                self._condition.notify()
        if here:
            self._carry_out(_Job(job, done))

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs, let those that are there come to their end, end the thread; whether it has ended.

        What cannot come to its end must be made to fail first, by closing what it waits for.
        """
        with self._condition:
            self._closing = True
            self._condition.notify()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _conduct(self) -> None:
        while True:
            with self._condition:
                while self._running or not self._jobs:
                    if self._closing and not self._jobs:
                        return
                    self._condition.wait()
                job = self._jobs.popleft()
                self._running = True
            self._carry_out(job)
            del job  # what it holds is not held until the next one comes

    def _carry_out(self, job: _Job) -> None:
        error: BaseException | None = None
        try:
            job.run()
        except BaseException as exc:
            error = exc
        with self._condition:
            self._running = False
            self._condition.notify()
        job.done(error)
