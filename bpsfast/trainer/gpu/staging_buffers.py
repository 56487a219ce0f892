"""Twins: shared memory that stands for memory on a device during one call which wants to read and write it itself.

For collectives and broadcasts, whose messages are not units. Copies go over streams of their own, beside those of the
lines; a twin is given back once the device has done with it.
"""
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from ...gpu.device import DeviceLocation, Event, OwnStream, Stream
from ...orchestration.errors import StallError

if TYPE_CHECKING:
    from ..input_memory import Region
    from ..session import Session
    from .devices import Devices

#: A wait looks this often whether the session was closed.
_SLICE_S = 0.1


class _Streams(NamedTuple):
    """From a device, and to it, after what one stream of it has done."""

    out: OwnStream
    back: OwnStream


class StagingBuffer:
    """*nbytes* that stand for those at *address*, at *place*. One thread at a time. Raises as `StagingBuffers.allocate`."""

    def __init__(self, twins: StagingBuffers, place: DeviceLocation, address: int, nbytes: int, keeps: object) -> None:
        self.place = place
        self.region = twins.allocate(place, nbytes)
        self._twins = twins
        self._address, self._nbytes = address, nbytes
        self._keeps = keeps
        self._last: Event | None = None

    def fetch(self) -> None:
        """Enqueue the copy from the device."""
        stream = self._twins.streams(self.place).out
        stream.wait(self.place.ready)
        stream.copy(self.region.address, self._address, self._nbytes, to_host=True)
        self._last = stream.record()

    def wait(self, deadline: float) -> None:
        """Block until what was enqueued last is done.

        Raises
        ------
        DeviceError
            If the device failed.
        StallError
            If it is not done at *deadline* (time.monotonic).
        """
        while self._last is not None and not self._last.wait(min(_SLICE_S, max(0.0, deadline - time.monotonic()))):
            self._twins.require_open()
            if time.monotonic() >= deadline:
                raise StallError(f"{self._nbytes} bytes did not come from {self.place.device.name} in time: the stream "
                                 "on which they were computed has not got so far (look at what this rank's GPU does)")

    def restore(self) -> Event:
        """Enqueue the copy back to the device; return where it is done."""
        stream = self._twins.streams(self.place).back
        stream.wait(self.place.ready)
        stream.copy(self._address, self.region.address, self._nbytes, to_host=False)
        self._last = stream.record()
        return self._last

    def release(self) -> None:
        """Give its memory back, once the device has done with it. Once."""
        self._twins.release(self.region, self._last, self._keeps)
        self._keeps = None


class StagingBuffers:
    """The twins of *session*, and the streams of their devices. Any thread."""

    def __init__(self, session: Session, devices: Devices) -> None:
        self._session = session
        self._devices = devices
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, Hashable], _Streams] = {}
        self._returning: list[tuple[Event, Region, object]] = []

    def allocate(self, place: DeviceLocation, nbytes: int) -> Region:
        """Return shared memory that the device at *place* reaches. Raises as `Memory.allocate`, and `DeviceError`."""
        self.reap()
        region = self._session.memory.allocate(nbytes)
        try:
            self._devices.pin(place.device, [self._session.memory.segments["rank", region.segment]])
        except BaseException:
            self._session.memory.release(region)
            raise
        return region

    def require_open(self) -> None:
        """Raise `ClosedError` if the session is closed."""
        self._session.require_open()

    def streams(self, place: DeviceLocation) -> _Streams:
        """Return the streams from the device at *place* and to it: others for each stream that owners of arrays work
        on, as the copies of one must not wait until another gets so far.
        """
        key = place.device.name, place.ready.origin
        with self._lock:
            self.require_open()
            found = self._streams.get(key)
            if found is None:
                found = self._streams[key] = _Streams(place.device.stream(), place.device.stream())
            return found

    def release(self, region: Region, last: Event | None, keeps: object) -> None:
        """Take *region* back after *last*; *keeps* is held until then."""
        if last is None:
            self._session.memory.release(region)
            return
        with self._lock:
            self._returning.append((last, region, keeps))
        self.reap()

    def reap(self) -> None:
        """Take back what devices have done with."""
        with self._lock:
            returning, self._returning = self._returning, []
            for each in returning:
                if not _is_over(each[0]):
                    self._returning.append(each)
                else:
                    self._session.memory.release(each[1])

    def close(self, deadline: float) -> bool:
        """End the streams. The session is closed. False: copies go on at *deadline* (time.monotonic)."""
        with self._lock:
            streams, self._streams = [stream for pair in self._streams.values() for stream in pair], {}
        is_over = [_is_idle(stream, max(0.0, deadline - time.monotonic())) for stream in streams]
        if not all(is_over):
            return False  # they hold their memory, on both sides
        for stream in streams:
            stream.close()
        self._returning.clear()
        return True


def _is_over(event: Event, timeout_s: float = 0.0) -> bool:
    """Return whether the device has done with what is before *event*; a device that has failed has."""
    with contextlib.suppress(Exception):
        return event.wait(timeout_s)
    return True


def _is_idle(stream: Stream, timeout_s: float) -> bool:
    """Return whether the device has done with what is enqueued on *stream*; one that has failed records nothing."""
    with contextlib.suppress(Exception):
        return stream.record().wait(timeout_s)
    return True
