"""The host device: the CPU in the place of a GPU, with threads as streams, for tests (setting host_device).

It runs and tests all code for GPUs without a GPU, except for the calls of CUDA. A thread runs the work of a stream in
order; a failure fails all later work, as on a GPU. Copies from or to host memory that is not pinned raise an error; on
a GPU they would be slow and blocking.
"""
from __future__ import annotations

import functools
import os
import queue
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ..orchestration.errors import DeviceError
from ..pyx.pages import Segment
from ..pyx.port import copy
from .device import DeviceLocation, Event, SharedMemory, Stream

#: How long `close` waits for a stream's thread, which may run the user's work.
_CLOSE_S = 5.0


class HostEvent:
    """An event of a `HostStream`, which is its *origin*. See `Event`."""

    def __init__(self, origin: Hashable) -> None:
        self.origin = origin
        self._reached = threading.Event()
        self._error: BaseException | None = None

    def reach(self, error: BaseException | None = None) -> None:
        """Mark it as reached, with the error that the stream failed with, if any."""
        self._error = error
        self._reached.set()

    def done(self) -> bool:
        if self._reached.is_set() and self._error is not None:
            raise DeviceError(f"a stream of the host device failed: {self._error!r}") from self._error
        return self._reached.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._reached.wait(timeout_s) and self.done()


class _HostQueue(ABC):
    """What streams of the host have in common: their work are functions."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device

    @abstractmethod
    def run(self, work: Callable[[], object]) -> None:
        """Run *work* after all earlier work."""

    def wait(self, event: Event) -> None:
        self.run(event.wait)

    def copy(self, destination: int, source: int, nbytes: int, to_host: bool) -> None:
        self._device.require_pinned(destination if to_host else source, nbytes)
        self.move(destination, source, nbytes)

    def move(self, destination: int, source: int, nbytes: int) -> None:
        self.run(lambda: copy(destination, source, nbytes))


class HostStream(_HostQueue):
    """A thread that runs enqueued work. See `Stream`."""

    def __init__(self, device: HostDevice) -> None:
        super().__init__(device)
        self._lock = threading.Lock()
        self._is_closed = False
        self._work: queue.SimpleQueue[Callable[[BaseException | None], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._go_on, name="bpsfast-host-stream", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue *work*, as a kernel on a GPU. It is skipped if earlier work has failed."""
        def step(error: BaseException | None) -> None:
            if error is None:
                work()

        self._enqueue(step)

    def record(self) -> HostEvent:
        event = HostEvent(self)
        self._enqueue(event.reach)
        return event

    def _enqueue(self, step: Callable[[BaseException | None], None]) -> None:
        with self._lock:
            if not self._is_closed:
                self._work.put(step)
                return
        step(DeviceError("it was closed before"))  # a thread that waits for the event must not wait forever

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._work.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _go_on(self) -> None:
        error: BaseException | None = None
        while (step := self._work.get()) is not None:
            try:
                step(error)
            except BaseException as exc:  # the user's work may raise anything; threads that wait for an event get it
                error = exc
            del step


class _Program(_HostQueue):
    """The stream of the host's own program: everything before the current call is done."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> HostEvent:
        event = HostEvent(self._device)
        event.reach()
        return event


class HostDevice:
    """The device of `host_device`. See `Device`."""

    def __init__(self) -> None:
        self.name = "host"
        self._lock = threading.Lock()
        self._pinned: list[tuple[int, int]] = []  # (begin, end), in order

    def enter(self) -> None:
        """See `Device`."""

    def stream(self) -> HostStream:
        return HostStream(self)

    def pin(self, address: int, nbytes: int, writable: bool) -> None:
        with self._lock:
            if any(begin < address + nbytes and address < end for begin, end in self._pinned):
                raise DeviceError(f"pages at {address:#x} are pinned already")  # as CUDA refuses it
            self._pinned = sorted([*self._pinned, (address, address + nbytes)])

    def unpin(self, address: int) -> None:
        with self._lock:
            self._pinned = [(begin, end) for begin, end in self._pinned if begin != address]

    def share(self, nbytes: int) -> SharedMemory:
        try:
            segment = Segment(nbytes, name="bpsfast-device")
        except OSError as exc:
            raise DeviceError(f"the host device has no {nbytes} bytes left: {exc}") from exc
        return SharedMemory(segment.address, segment.nbytes, os.dup(segment.fileno()), "", segment.close)

    def flush_remote_writes(self) -> None:
        """See `Device`. A CPU always sees what cards have written."""

    def require_pinned(self, address: int, nbytes: int) -> None:
        """Raise `DeviceError` unless these bytes of the host lie in one pinned range."""
        pinned = self._pinned
        at = bisect_right(pinned, (address, 1 << 64)) - 1
        if at < 0 or address + nbytes > pinned[at][1]:
            raise DeviceError(f"a copy from or to {nbytes} bytes at {address:#x} of the host, which are not pinned")

    def location(self, stream: Stream | None = None) -> DeviceLocation:
        """Return the location of an array whose owner works on *stream*; None: in the host's own program."""
        own = _Program(self) if stream is None else stream
        return DeviceLocation(self, own.record(), lambda: own)


@functools.cache
def host_device() -> HostDevice:
    """Return the host device of this process."""
    return HostDevice()


class HostArray(np.ndarray[Any, Any]):
    """An array on the host device, whose owner works on `stream` (None: in the host's own program)."""

    stream: HostStream | None = None

    def __array_finalize__(self, origin: Any) -> None:
        """Views and new arrays made of it belong to the same stream."""
        self.stream = getattr(origin, "stream", None)
