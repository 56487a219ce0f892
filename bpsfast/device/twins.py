"""Twins: shared memory that stands for memory on a device during one call which wants to read and write it itself.

For collectives and broadcasts, whose messages are not units. Copies go over two streams of their own, beside those of
the lines; a twin is given back once the device has done with it.
"""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .device import Event, OwnStream, Place

if TYPE_CHECKING:
    from ..trainer.memory import Region
    from ..trainer.session import Session
    from .devices import Devices


class Twin:
    """*nbytes* that stand for those at *address*, at *place*. One thread at a time."""

    def __init__(self, twins: Twins, place: Place, address: int, nbytes: int, keeps: object) -> None:
        self.place = place
        self.region = twins.allocate(place, nbytes)
        self._twins = twins
        self._address, self._nbytes = address, nbytes
        self._keeps = keeps
        self._last: Event | None = None

    def fetch(self) -> None:
        """Enqueue the copy from the device."""
        stream = self._twins.streams(self.place)[0]
        stream.wait(self.place.ready)
        stream.copy(self.region.address, self._address, self._nbytes, to_host=True)
        self._last = stream.record()

    def wait(self) -> None:
        """Block until what was enqueued last is done. Raises `DeviceError` if the device failed."""
        if self._last is not None:
            self._last.wait()

    def restore(self) -> Event:
        """Enqueue the copy back to the device; return where it is done."""
        stream = self._twins.streams(self.place)[1]
        stream.wait(self.place.ready)
        stream.copy(self._address, self.region.address, self._nbytes, to_host=False)
        self._last = stream.record()
        return self._last

    def release(self) -> None:
        """Give its memory back, once the device has done with it. Once."""
        self._twins.release(self.region, self._last, self._keeps)
        self._keeps = None


class Twins:
    """The twins of *session*, and the streams of their devices. Any thread."""

    def __init__(self, session: Session, devices: Devices) -> None:
        self._session = session
        self._devices = devices
        self._lock = threading.Lock()
        self._streams: dict[str, tuple[OwnStream, OwnStream]] = {}
        self._returning: list[tuple[Event, Region, object]] = []

    def allocate(self, place: Place, nbytes: int) -> Region:
        """Return shared memory that the device at *place* reaches. Raises as `Memory.allocate`, and `DeviceError`."""
        self._reap()
        region = self._session.memory.allocate(nbytes)
        self._devices.pin(place.device, [self._session.memory.segments["rank", region.segment]])
        return region

    def streams(self, place: Place) -> tuple[OwnStream, OwnStream]:
        """Return the streams from the device at *place* and to it."""
        with self._lock:
            self._session.require_open()
            found = self._streams.get(place.device.name)
            if found is None:
                found = self._streams[place.device.name] = place.device.stream(), place.device.stream()
            return found

    def release(self, region: Region, last: Event | None, keeps: object) -> None:
        """Take *region* back after *last*; *keeps* is held until then."""
        if last is None:
            self._session.memory.release(region)
            return
        with self._lock:
            self._returning.append((last, region, keeps))

    def _reap(self) -> None:
        with self._lock:
            done = [each for each in self._returning if each[0].done()]
            self._returning = [each for each in self._returning if each not in done]
        for _, region, _ in done:
            self._session.memory.release(region)

    def close(self) -> None:
        """End the streams. The session is closed."""
        with self._lock:
            streams, self._streams = self._streams, {}
            self._returning.clear()
        for pair in streams.values():
            for stream in pair:
                stream.close()
