"""The interface of a device: streams, events, pinned and shared memory. Nothing here waits for other ranks.

A stream runs its work in order, beside the host's program. An event is a point in that order. Terms and rules are
CUDA's; `host` has a device without a GPU that follows them.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..base.free_list import FreeList
from ..orchestration.errors import UnsupportedError


class Event(Protocol):
    """A point in the order of a stream. Any thread."""

    @property
    def origin(self) -> Hashable:
        """Identifies its stream: of two events of one origin, the one that was recorded first is reached first."""

    def done(self) -> bool:
        """Return whether all work before it is done; raises `DeviceError` if the device failed."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until all work before it is done, at most *timeout_s*; return whether it is. Raises as
        `done`.

        None blocks without limit: only for events whose work waits for nothing else.
        """


class Stream(Protocol):
    """A queue of work on a device. Any thread; work that two threads enqueue at once runs in either order."""

    def record(self) -> Event:
        """Return an event after all work enqueued so far."""

    def wait(self, event: Event) -> None:
        """Make later work begin after *event*. Does not block the host on a GPU's stream."""

    def copy(self, destination: int, source: int, nbytes: int, to_host: bool) -> None:
        """Enqueue a copy between device memory and pinned host memory."""

    def move(self, destination: int, source: int, nbytes: int) -> None:
        """Enqueue a copy within device memory."""


class OwnStream(Stream, Protocol):
    """A stream that this package has made, and closes."""

    def close(self) -> None:
        """Close it after the work that is enqueued. Idempotent; raises nothing."""


class SharedMemory(NamedTuple):
    """Device memory that can be registered with a card by the descriptor *fd*: a dma-buf, and `gpu` is the device's
    PCIe address, or a memfd, and `gpu` is "". *free* frees the memory.
    """

    address: int
    nbytes: int
    fd: int
    gpu: str
    free: Callable[[], object]

    def close(self) -> None:
        """Free it; call it once. Cards keep alive what they have registered. Raises nothing."""
        os.close(self.fd)
        self.free()


class Device(Protocol):
    """One device of this process, identified by its name. Any thread."""

    name: str

    def enter(self) -> None:
        """Make it this thread's current device: called once by threads that use no other."""

    def stream(self) -> OwnStream:
        """Return a new stream, which does not wait for any other."""

    def pin(self, address: int, nbytes: int, writable: bool) -> None:
        """Pin these pages of the host, so that the device can reach them; not *writable*: they are mapped read-only.

        Raises `DeviceError` if the device or the machine does not allow it.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`. Raises nothing."""

    def share(self, nbytes: int) -> SharedMemory:
        """Return new device memory that a card can reach.

        Raises `UnsupportedError` if the device or its driver does not support it. Raises `DeviceError` if the device
        has no memory left.
        """

    def flush_remote_writes(self) -> None:
        """Make later work see what cards have written to the device's memory so far.

        Bytes and completions take different paths over PCIe: the device may not see bytes whose completion the host has
        seen. Called by the host after the completion; blocks about a microsecond at most.
        """


@dataclass(frozen=True)
class DeviceLocation:
    """The device of an array, and its place in the order of its owner's work.

    Its bytes may be read and written after `ready`. `caller` returns the stream that its owner works on now: work that
    is enqueued there after a call must find the result.
    """

    device: Device
    ready: Event
    caller: Callable[[], Stream]


class DeviceSegment:
    """Segment *number* of the node in device memory of this rank; *memory* is None for a segment of another rank."""

    def __init__(self, number: int, memory: SharedMemory | None, result_nbytes: int = 0) -> None:
        self.number = number
        self.memory = memory
        self.holes = FreeList(0 if memory is None else memory.nbytes - result_nbytes)
        self.begin = result_nbytes

    @property
    def address(self) -> int:
        if self.memory is None:
            raise UnsupportedError("a sum lies in the memory of another rank's GPU, which hands it on")
        return self.memory.address


class DeviceRegion(NamedTuple):
    """*nbytes* of input memory on a device, at *offset* of a segment."""

    segment: DeviceSegment
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.segment.address + self.offset
