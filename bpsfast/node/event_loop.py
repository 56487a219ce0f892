"""The event loop of a node's control thread: sockets, descriptors, timers, and SIGTERM and SIGINT turned into calls."""
from __future__ import annotations

import contextlib
import heapq
import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from ..orchestration.wake_up import WakeUp


class EventLoop:
    """Calls handlers when a descriptor or ZeroMQ socket is readable, at a given time, or on request.

    Only `call_soon` may be used from other threads and signal handlers. Handlers run one at a time; exceptions are
    passed to *on_error*, and the loop goes on.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], object]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._calls: deque[Callable[[], object]] = deque()
        #: The thread that made it, and runs it.
        self.thread = threading.current_thread()
        self._wake = WakeUp()
        self.watch(self._wake.fileno(), self._run_calls)

    def watch(self, what: int | zmq.Socket[bytes], handler: Callable[[], object]) -> None:
        """Call *handler* whenever *what* (a descriptor or a ZeroMQ socket) is readable or at its end."""
        self._poller.register(what, zmq.POLLIN)
        self._handlers[what] = handler

    def forget(self, what: int | zmq.Socket[bytes]) -> None:
        """Stop watching *what*, if it is watched; call this before it is closed."""
        if self._handlers.pop(what, None) is not None:
            self._poller.unregister(what)

    def call_at(self, when: float, handler: Callable[[], None]) -> None:
        """Call *handler* once, at the monotonic time *when* (seconds) or soon after."""
        heapq.heappush(self._timers, (when, next(self._counter), handler))

    def call_soon(self, handler: Callable[[], object]) -> None:
        """Call *handler* in the loop's thread as soon as possible. Any thread; does nothing once the loop is closed."""
        self._calls.append(handler)
        self._wake.ring()

    def run_once(self, timeout_s: float) -> None:
        """Wait at most *timeout_s* for something to happen and call its handlers."""
        if self._timers:
            timeout_s = min(timeout_s, max(0.0, self._timers[0][0] - time.monotonic()))
        # Rounded up: a timer that is due in 0.4 ms must not make the loop spin.
        for what, _ in self._poller.poll(int(timeout_s * 1000) + 1):
            handler = self._handlers.get(what)  # an earlier handler may have forgotten it
            if handler is not None:
                self._call(handler)
        while self._timers and self._timers[0][0] <= time.monotonic():
            self._call(heapq.heappop(self._timers)[2])

    def close(self) -> None:
        """Close the loop's own descriptor. Watched ones are their owners'."""
        self._handlers.clear()
        self._timers.clear()
        self._wake.close()

    def _call(self, handler: Callable[[], object]) -> None:
        try:
            handler()
        except Exception as exc:
            self._on_error(exc)

    def _run_calls(self) -> None:
        self._wake.clear()
        while self._calls:
            self._call(self._calls.popleft())


@contextlib.contextmanager
def stop_signals(handler: Callable[[str], None]) -> Iterator[None]:
    """While entered, SIGTERM and SIGINT call *handler* with the signal's name. Has no effect outside the main thread.

    The handler runs between two bytecodes of the main thread: it should only record the signal.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, lambda caught, _: handler(signal.Signals(caught).name))
              for number in ((signal.SIGTERM, signal.SIGINT) if is_main else ())}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
