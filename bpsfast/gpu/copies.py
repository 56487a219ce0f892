"""A line: what one thread brings over streams of a device, the most urgent first, until the session ends."""
from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from ..orchestration.errors import BpsError, DeviceError, StallError
from .device import Device, Event, OwnStream, Stream

#: A wait looks this often whether something else of the session has to be done, or the session was closed.
_SLICE_S = 0.1
#: Where nothing can be done the thread looks again so soon. Of a stream that others work on CUDA tells only whether it
#: has got so far: to be woken by it is to wait for it, and for nothing else.
_NAP_S = 0.0002


class DeviceCopy:
    """One unit's way over a line: begun by the trainer's thread, ended by the line's. Any thread may wait for it.

    *keeps* holds the memory on the device, for as long as copies from it, or to it, may go on.
    """

    def __init__(self, title: str, urgency: int, keeps: object) -> None:
        self.title = title
        self.urgency = urgency
        self.keeps = keeps
        self.then: Callable[[BpsError | None], None] | None = None  # called once it is over, by who ends it
        self.is_queued = False  # a line lets go of it, nobody else
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._error: BpsError | None = None

    @property
    def is_over(self) -> bool:
        """Whether `wait` will not block."""
        return self._over.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether it is over, and `wait` raises."""
        return self._error is not None

    def end(self, error: BpsError | None = None) -> None:
        """Enter that it is over, and why it failed. The first end counts. Any thread."""
        with self._ending:
            if self._over.is_set():
                return
            self._error = error
            self._over.set()
        if self.then is not None:
            self.then(error)

    def release_memory(self) -> None:
        """Let go of what it keeps: no copy goes on any more. The line's thread, or who closes it."""
        self.keeps = None

    def wait(self, deadline: float, meanwhile: Callable[[], object]) -> None:
        """Wait until it is over, calling *meanwhile* now and then; raise what it failed with.

        Raises
        ------
        StallError
            If it is not over at *deadline* (time.monotonic).
        """
        while not self._over.is_set():
            rest_s = deadline - time.monotonic()
            if self._over.wait(max(0.0, min(rest_s, _SLICE_S))):
                break
            if rest_s <= 0:
                raise StallError(f"{self.title} did not come in time: the stream on which it was computed has not got "
                                 "so far (look at what this rank's GPU does), or the copies wait for others")
            meanwhile()
        if self._error is not None:
            raise self._error


class ResultCopy(DeviceCopy):
    """A sum's way back to a device: over once its copies are enqueued, which are done at `event`."""

    event: Event | None = None


P = TypeVar("P", bound=DeviceCopy)


class CopyThread(ABC, Generic[P]):
    """Passages of kind P between *device* and the host. Any thread may `add`; the thread starts with the first."""

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self._name = name
        self._condition = threading.Condition()
        self._added: list[P] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._why_closed: Callable[[], BpsError] = lambda: DeviceError(f"{name} is closed")

    def add(self, passage: P) -> None:
        """Let *passage* have its turn."""
        with self._condition:
            if not self._is_closed:
                passage.is_queued = True
                self._added.append(passage)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._condition.notify()
                return
        passage.end(self._why_closed())
        passage.release_memory()

    def close(self, why: Callable[[], BpsError]) -> None:
        """Let the thread end, and fail what has not got there with *why*. `join` comes after."""
        with self._condition:
            if not self._is_closed:
                self._is_closed, self._why_closed = True, why
            self._condition.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, and no copy of it goes on; False: they do. After `close`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _take(self, block: bool) -> list[P] | None:
        """Return what was added, waiting for something if *block*; None: the line is closed."""
        with self._condition:
            while block and not self._added and not self._is_closed:
                self._condition.wait()
            if self._is_closed:
                return None
            added, self._added = self._added, []
            return added

    def _nap(self) -> None:
        """Let a moment pass, unless something was added, or the line closed."""
        with self._condition:
            if not self._added and not self._is_closed:
                self._condition.wait(_NAP_S)

    def _run(self) -> None:
        under_way: list[P] = []
        stream: OwnStream | None = None
        try:
            self._device.enter()
            stream = self._device.stream()
            while (added := self._take(block=not under_way)) is not None:
                under_way += added
                under_way = self._bring(under_way, stream)
                added.clear()
        except BpsError as exc:
            left = self._fail(under_way, exc)
        except BaseException as exc:  # of a framework's event, say: whoever waits must be told
            left = self._fail(under_way, DeviceError(f"{self._name} cannot go on: {exc!r}"))
        else:
            left = self._fail(under_way, self._why_closed())
        if stream is not None:
            self._drain(left, stream)
            stream.close()
        for passage in left:
            passage.release_memory()

    def _fail(self, under_way: list[P], error: BpsError) -> list[P]:
        """End everything with *error*, and whatever comes after; return it."""
        with self._condition:
            self._is_closed, self._why_closed = True, lambda: error
            left, self._added = [*under_way, *self._added], []
        for passage in left:
            passage.end(error)
        return left

    def _drain(self, left: list[P], stream: Stream) -> None:
        """Wait for copies that were enqueued for *left*: until then nobody else may have the memory, on either side."""
        with contextlib.suppress(Exception):  # of a device that has failed nothing is under way
            stream.record().wait()

    @abstractmethod
    def _bring(self, under_way: list[P], stream: Stream) -> list[P]:
        """Go on with *under_way*, blocking a while if nothing can be done; return what is not over."""
