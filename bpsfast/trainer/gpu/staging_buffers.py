"""Staging buffers: shared memory in place of memory on a device, for one collective or broadcast.

Those calls read and write memory themselves, as their messages are not units. Copies use streams of their own, beside
those of the copy threads. A buffer is released once the device has finished with it.
"""
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from ...gpu.device import Device, DeviceLocation, Event, OwnStream, Stream
from ...orchestration.errors import StallError
from ...pyx.pages import Segment
from ...pyx.port import copy
from ..input_memory import Region
from ..tensor_input import TensorInput, tensor_input
from . import DeviceSession

#: A wait checks at this interval whether the session was closed.
_SLICE_S = 0.1


class _Streams(NamedTuple):
    """Two streams for copies from and to a device, ordered after one stream of an owner of arrays."""

    to_host: OwnStream
    to_device: OwnStream


class StagingBuffer:
    """Shared memory in place of the *nbytes* at *address* of a device. *keeps* holds these. One thread at a time.

    Raises as `StagingBuffers.allocate`.
    """

    def __init__(self, buffers: StagingBuffers, location: DeviceLocation, address: int, nbytes: int,
                 keeps: object) -> None:
        self.location = location
        self.region = buffers.allocate(location, nbytes)
        self._buffers = buffers
        self._address, self._nbytes = address, nbytes
        self._keeps = keeps
        self._last: Event | None = None

    def fetch(self) -> None:
        """Enqueue the copy from the device."""
        stream = self._buffers.streams(self.location).to_host
        stream.wait(self.location.ready)
        stream.copy(self.region.address, self._address, self._nbytes, to_host=True)
        self._last = stream.record()

    def wait(self, deadline: float) -> None:
        """Block until the last copy is done.

        Raises `DeviceError` if the device failed. Raises `StallError` if it is not done at *deadline* (time.monotonic).
        """
        while self._last is not None and not self._last.wait(min(_SLICE_S, max(0.0, deadline - time.monotonic()))):
            self._buffers.session.require_open()
            if time.monotonic() >= deadline:
                raise StallError(f"{self._nbytes} bytes did not come from {self.location.device.name} in time: the "
                                 "stream that computes them has not finished. See what this rank's GPU does")

    def restore(self) -> Event:
        """Enqueue the copy back to the device; return the event after it."""
        stream = self._buffers.streams(self.location).to_device
        stream.wait(self.location.ready)
        stream.copy(self._address, self.region.address, self._nbytes, to_host=False)
        self._last = stream.record()
        return self._last

    def release(self) -> None:
        """Release the memory once the device has finished with it. Call it once."""
        self._buffers.release(self.region, self._last, self._keeps)
        self._keeps = None


class StagingBuffers:
    """The staging buffers of *session*, and the streams of their devices. *pin* pins segments. Any thread."""

    def __init__(self, session: DeviceSession, pin: Callable[[Device, Sequence[Segment]], None]) -> None:
        self.session = session
        self._pin = pin
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, Hashable], _Streams] = {}
        self._returning: list[tuple[Event, Region, object]] = []

    def allocate(self, location: DeviceLocation, nbytes: int) -> Region:
        """Return shared memory that the device reaches. Raises as `InputMemory.allocate`, and `DeviceError`."""
        self.reap()
        region = self.session.memory.allocate(nbytes)
        try:
            self._pin(location.device, [self.session.memory.segments["rank", region.segment]])
        except BaseException:
            self.session.memory.release(region)
            raise
        return region

    def streams(self, location: DeviceLocation) -> _Streams:
        """Return the streams for copies from and to *location*: each stream of an owner has its own two, as copies for
        one must not wait for the work of another.
        """
        key = location.device.name, location.ready.origin
        with self._lock:
            self.session.require_open()
            found = self._streams.get(key)
            if found is None:
                found = self._streams[key] = _Streams(location.device.stream(), location.device.stream())
            return found

    def release(self, region: Region, last: Event | None, keeps: object) -> None:
        """Release *region* after the event *last*; hold *keeps* until then."""
        if last is None:
            self.session.memory.release(region)
            return
        with self._lock:
            self._returning.append((last, region, keeps))
        self.reap()

    def reap(self) -> None:
        """Release the regions that devices have finished with."""
        with self._lock:
            returning, self._returning = self._returning, []
            for each in returning:
                if not _is_over(each[0]):
                    self._returning.append(each)
                else:
                    self.session.memory.release(each[1])

    def close(self, deadline: float) -> bool:
        """Close the streams of a closed session. False if copies still go on at *deadline* (time.monotonic)."""
        with self._lock:
            streams = [stream for pair in self._streams.values() for stream in pair]
        is_over = [_is_idle(stream, max(0.0, deadline - time.monotonic())) for stream in streams]
        if not all(is_over):
            return False  # the copies need their memory, on both sides: the next call asks for the same streams
        self._streams.clear()
        for stream in streams:
            stream.close()
        self._returning.clear()
        return True


def _is_over(event: Event) -> bool:
    """Return whether *event* was reached, or the device has failed."""
    with contextlib.suppress(Exception):
        return event.wait(0.0)
    return True


def _is_idle(stream: Stream, timeout_s: float) -> bool:
    """Return whether all work on *stream* is done, or the device has failed."""
    with contextlib.suppress(Exception):
        return stream.record().wait(timeout_s)
    return True


class Broadcaster(Protocol):
    """What `broadcast` needs of `trainer.broadcaster.Broadcaster`."""

    def send(self, text: str, pieces: Sequence[tuple[int, int]]) -> None: ...
    def receive(self, root: int, text: str, accept: Callable[[int], Sequence[tuple[int, int]]]) -> None: ...


def broadcast(session: DeviceSession, broadcaster: Broadcaster, x: Any, memory: TensorInput, root_rank: int,
              text: str) -> Any:
    """As `trainer.broadcaster.broadcast`, of *x*, which is *memory* on a device.

    Sends the root's bytes as they are after the work that its owner has enqueued. Work enqueued after the return finds
    the result.
    """
    result, target = x, memory
    if not memory.writable:
        result = memory.empty_like()
        target = session.devices.located(tensor_input(result))
    if session.rank != root_rank:
        with _staged(session, target) as buffer:
            broadcaster.receive(root_rank, text, lambda nbytes: [(buffer.region.address, nbytes)])
            _copy_back(buffer)
        return result
    with _staged(session, memory) as source:
        source.fetch()
        source.wait(time.monotonic() + session.settings.timeout_s)
        if session.size > 1:
            broadcaster.send(text, [(source.region.address, memory.nbytes)])
        if not memory.writable:
            with _staged(session, target) as buffer:
                copy(buffer.region.address, source.region.address, memory.nbytes)
                _copy_back(buffer)
    return result


def _copy_back(buffer: StagingBuffer) -> None:
    """Copy *buffer* to the device; later work of its owner waits for it."""
    buffer.location.caller().wait(buffer.restore())


@contextmanager
def _staged(session: DeviceSession, memory: TensorInput) -> Iterator[StagingBuffer]:
    assert memory.location is not None, "it lies on a device"
    buffer = StagingBuffer(session.devices.staging_buffers, memory.location, memory.address, memory.nbytes,
                           memory.owner)
    try:
        yield buffer
    finally:
        buffer.release()
