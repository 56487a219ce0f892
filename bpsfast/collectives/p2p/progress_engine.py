"""Drives the message connections of a rank, in the thread that waits for a message, else in a thread of its own.

A Python thread that is woken beside a busy one waits up to 5 ms for the interpreter, and a thread switch costs more
than a small message. So a waiting thread polls the connections itself; the engine's thread takes over when no thread
has waited for a millisecond.
"""
from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable

from ...orchestration.errors import BpsError, ProtocolError
from ...orchestration.wake_up import WakeUp

#: A yield that took longer was slow.
SLOW_YIELD_S = 0.001
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.128
#: This many waits that end awake save as much as a slow yield costs.
_MANY_MET = 64
log = logging.getLogger("bpsfast.collectives.p2p")
#: How often the state of the job is checked, which no descriptor signals: while transfers are under way, and while none
#: is, since a new one does not wake the sleeping thread.
_SLICE_S, _IDLE_S = 0.1, 1.0
#: The thread takes over when no thread has waited for this long; without transfers it looks again after at most this
#: long.
_LINGER_S, _PAUSE_MAX_S = 0.001, 0.05


class CpuContention:
    """Decides whether waits sleep at once, after slow yields. One slow yield may just be a paused virtual machine.

    After a slow yield waits sleep at once for a while: shortly if many waits have ended awake since the one before,
    else twice as long as the last time. Any thread: a race makes a pause shorter or longer, no more.
    """

    def __init__(self) -> None:
        self._until = self._pause_s = 0.0
        self._n_met = 0

    def is_there(self, now: float) -> bool:
        """Return whether waits sleep at once at *now* (`time.monotonic`)."""
        return now < self._until

    def slow(self, now: float) -> None:
        """Note that a yield that ended at *now* was slow."""
        alone = self._n_met >= _MANY_MET or self._pause_s == 0.0
        self._pause_s = _LEAST_PAUSE_S if alone else min(2 * self._pause_s, _MOST_PAUSE_S)
        self._n_met = 0
        self._until = now + self._pause_s

    def met(self) -> None:
        """Note that a wait has ended awake."""
        self._n_met += 1


class ProgressEngine:
    """The connections' event loop. `lock` guards everything that its handlers touch.

    *busy* returns, with the lock, whether transfers are under way. *work* does a piece of work that needs no
    descriptor, without the lock, and returns whether there was one. *settle* is called after each turn, without the
    lock: it wakes waiting threads and runs callbacks. *check* raises what ended the job, if it has ended; *failed* is
    called with that error, with the lock. *tick* is called as often as *check*, without the lock. A wait polls for
    *awake_s* before it sleeps.
    """

    def __init__(self, name: str, *, busy: Callable[[], bool], work: Callable[[], bool], settle: Callable[[], None],
                 check: Callable[[], None], failed: Callable[[BpsError], None], tick: Callable[[], None],
                 awake_s: float) -> None:
        self.lock = threading.RLock()
        self._busy, self._work, self._settle = busy, work, settle
        self._check, self._failed, self._tick, self._awake_s = check, failed, tick, awake_s
        self._changed = threading.Condition(self.lock)
        self._handover = threading.Condition(self.lock)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._driver = 0  # identity of the thread that polls
        self._n_waiting = 0
        self._inline_at = self._checked_at = 0.0
        self._contention = CpuContention()
        self._closed = self._has_given_up = False
        self._wake = WakeUp()
        self._epoll = select.epoll()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.watch(self._wake.fileno(), select.EPOLLIN, lambda events: self._woken())

    def start(self) -> None:
        self._thread.start()

    # -- with the lock ---------------------------------------------------------------------------------------------

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call *handler*, with the lock, when there are *events* on *fd*."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Watch *fd* for other events."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching *fd*, before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def tell(self) -> None:
        """Wake the waiting threads, to check their conditions."""
        if self._n_waiting:
            self._changed.notify_all()
            if self._driver != self._thread.ident:
                self._interrupt()

    def nudge(self) -> None:
        """Let a waiting thread, or the engine's, call `work`."""
        self._interrupt()
        if not self._driver and not self._n_waiting:
            self._handover.notify()

    def _interrupt(self) -> None:
        if self._driver not in (0, threading.get_ident()) and not self._closed:
            self._wake.ring()

    # -- without it ------------------------------------------------------------------------------------------------

    def wait(self, over: Callable[[], bool], timeout_s: float) -> bool:
        """Drive the connections until ``over()``; return False if it is not after *timeout_s* seconds."""
        deadline = time.monotonic() + timeout_s
        with self.lock:
            self._n_waiting += 1
        try:
            while True:
                with self.lock:
                    if over():
                        return True
                    left_s = deadline - time.monotonic()
                    if left_s <= 0 or self._closed:
                        return False
                    if self._driver not in (0, threading.get_ident()):
                        if self._driver == self._thread.ident:
                            self._interrupt()
                        self._changed.wait(min(left_s, _SLICE_S))
                        continue
                    outer, self._driver = self._driver, threading.get_ident()
                self._drive(over, deadline, outer)
        finally:
            with self.lock:
                self._n_waiting -= 1
                self._inline_at = time.monotonic()
                if self._busy():
                    self._handover.notify()

    def close(self) -> None:
        """Stop the thread, which may be the caller, and free the descriptors. No thread may be waiting."""
        with self.lock:
            self._closed = True
            self._changed.notify_all()
            self._handover.notify_all()
            self._wake.ring()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self.lock:
            while self._driver not in (0, threading.get_ident()):  # the polling thread was woken, and a turn is short
                self._changed.wait(_SLICE_S)
            self._handlers.clear()
            self._epoll.close()
            self._wake.close()

    def drop_in_child(self) -> None:
        """Close a forked child's copies of the descriptors; without the lock, which may be inherited locked."""
        self._epoll.close()
        os.close(self._wake.fileno())  # not `close`, which has a lock, too

    # -- one turn --------------------------------------------------------------------------------------------------

    def _drive(self, over: Callable[[], bool], deadline: float, outer: int) -> None:
        """Poll until ``over()`` or the deadline; then *outer* polls: a thread, or this one in a callback of a turn."""
        awake_until, waited = time.monotonic() + self._awake_s, False
        try:
            while not over() and not self._closed:
                now = time.monotonic()
                if now >= deadline:
                    return
                if now < awake_until and not self._contention.is_there(now):
                    if not self._turn(0.0):
                        self._yield()
                        waited = True
                    elif waited:
                        self._contention.met()
                        waited = False
                elif self._turn(min(_SLICE_S, deadline - now)):
                    awake_until = time.monotonic() + self._awake_s
        finally:
            with self.lock:
                self._driver = outer
                if self._n_waiting > 1:
                    self._changed.notify_all()

    def _yield(self) -> None:
        before = time.monotonic()
        os.sched_yield()
        after = time.monotonic()
        if after - before > SLOW_YIELD_S:
            self._contention.slow(after)

    def _turn(self, timeout_s: float) -> bool:
        """Wait for events and handle them; return whether there were any."""
        try:
            worked = self._work()
            events = self._epoll.poll(0.0 if worked else timeout_s)
            if events:
                self._handle(events)
            now = time.monotonic()
            if now - self._checked_at >= _SLICE_S:
                self._checked_at = now
                self._look()
            self._settle()
            return bool(events) or worked
        except Exception as exc:
            self._give_up(exc)
            return False

    def _handle(self, events: list[tuple[int, int]]) -> None:
        with self.lock:
            for fd, what in events:
                handler = self._handlers.get(fd)
                if handler is not None:  # else an earlier handler has closed it
                    handler(what)
            if self._n_waiting > 1:
                self._changed.notify_all()

    def _give_up(self, cause: BaseException) -> None:
        """Fail all transfers after an unexpected error: without that they would hang."""
        if self._has_given_up:
            log.debug("driving the connections failed again", exc_info=cause)
            return
        self._has_given_up = True
        log.error("driving the connections failed", exc_info=cause)
        error = ProtocolError(f"{self._thread.name} failed: {type(cause).__name__}: {cause}")
        try:
            with self.lock:
                self._failed(error)
        finally:
            self._settle()

    def _look(self) -> None:
        try:
            self._check()
        except BpsError as exc:
            with self.lock:
                self._failed(exc)
        self._tick()

    def _woken(self) -> None:
        self._wake.clear()

    def _run(self) -> None:
        pause_s = _LINGER_S
        while True:
            with self.lock:
                if self._has_given_up and not self._closed:  # it may fail again, and no transfer is under way
                    self._handover.wait(_IDLE_S)
                if self._closed:
                    return
                quiet_s = time.monotonic() - self._inline_at
                if self._driver or self._n_waiting or quiet_s < _LINGER_S:
                    told = self._handover.wait(pause_s)
                    pause_s = _LINGER_S if told else min(2 * pause_s, _PAUSE_MAX_S)
                    continue
                pause_s = _LINGER_S
                self._driver = threading.get_ident()
                slice_s = _SLICE_S if self._busy() else _IDLE_S
            try:
                self._turn(slice_s)
            except BaseException as exc:  # whatever it is: no other thread drives transfers that no thread waits for
                self._give_up(exc)
            finally:
                with self.lock:
                    self._driver = 0
                    if self._n_waiting:
                        self._changed.notify_all()
