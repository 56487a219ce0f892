"""What a device can do, as those see it who bring gradients from it and back. Nothing here waits for other ranks.

Work on a stream is done in its order, beside the host's program. An event is a place in that order. The terms, and all
rules, are CUDA's; `host` has a device without a GPU that keeps them.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..base.free_list import FreeList
from ..orchestration.errors import UnsupportedError


class Event(Protocol):
    """A place in the order of a stream. Any thread."""

    @property
    def origin(self) -> Hashable:
        """What its stream is known by: of two events of one origin, the one that was recorded first is reached first.
        """

    def done(self) -> bool:
        """Return whether everything before it is done; raises `DeviceError` if the device failed."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until everything before it is done, so long at most; return whether it is. Raises as
        `done`. None: only where nothing before it waits for others.
        """


class Stream(Protocol):
    """Work in its order. Any thread; what two threads enqueue at once is in either order."""

    def record(self) -> Event:
        """Return the place after everything enqueued so far."""

    def wait(self, event: Event) -> None:
        """Let what is enqueued from now on begin after *event*. Does not block the host on a real stream."""

    def copy(self, destination: int, source: int, nbytes: int, to_host: bool) -> None:
        """Enqueue a copy between the device's memory and pinned memory of the host."""

    def move(self, destination: int, source: int, nbytes: int) -> None:
        """Enqueue a copy within the device's memory."""


class OwnStream(Stream, Protocol):
    """A stream that was made here."""

    def close(self) -> None:
        """Let go of it: after what is enqueued it does nothing any more. Idempotent; raises nothing."""


class SharedMemory(NamedTuple):
    """*nbytes* at *address* of a device, which whoever has the descriptor *fd* can register with a card. `gpu`: the
    device's address on PCIe, and *fd* is a dma-buf; "": it is a memfd. *free* gives the memory back.
    """

    address: int
    nbytes: int
    fd: int
    gpu: str
    free: Callable[[], object]

    def close(self) -> None:
        """Give it back, once. Cards that have it registered keep it. Raises nothing."""
        os.close(self.fd)
        self.free()


class Device(Protocol):
    """One device in this process, known by its name. Any thread."""

    name: str

    def enter(self) -> None:
        """Make it the one that this thread works with: called once by threads that do nothing else."""

    def stream(self) -> OwnStream:
        """Return a new stream, which waits for no other one."""

    def pin(self, address: int, nbytes: int, writable: bool) -> None:
        """Let the device reach these pages of the host by itself; not *writable*: they are mapped for reading.

        Raises `DeviceError` if it, or the machine, does not let us.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`. Raises nothing."""

    def share(self, nbytes: int) -> SharedMemory:
        """Return new memory of the device that a card can reach.

        Raises
        ------
        UnsupportedError
            If the device, or its driver, does not let cards reach its memory.
        DeviceError
            If it has no such memory left.
        """

    def flush_remote_writes(self) -> None:
        """Let what is enqueued from now on find what cards have written to the device's memory until now.

        Bytes and completion take different ways over PCIe: that the host has seen the one does not say that the device
        sees the other. Called by the host, after it has seen the completion; blocks for about a microsecond at most.
        """


@dataclass(frozen=True)
class DeviceLocation:
    """Where an array on a device lies in its owner's order of things.

    Its bytes are read, and written, after `ready`. `caller` returns the stream on which its owner works now: what is
    enqueued there after a call finds the result.
    """

    device: Device
    ready: Event
    caller: Callable[[], Stream]


class DeviceSegment:
    """Segment *number* of this rank's node, memory of a device here; None: of another rank's, which it is not told."""

    def __init__(self, number: int, memory: SharedMemory | None, result_nbytes: int = 0) -> None:
        self.number = number
        self.memory = memory
        self.holes = FreeList(0 if memory is None else memory.nbytes - result_nbytes)
        self.begin = result_nbytes

    @property
    def address(self) -> int:
        """Where it begins on the device."""
        if self.memory is None:
            raise UnsupportedError("a sum lies in the memory of another rank's GPU, which hands it on")
        return self.memory.address


class DeviceRegion(NamedTuple):
    """*nbytes* of input memory on a device: what the node calls them, and where they are."""

    segment: DeviceSegment
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Where they begin on the device."""
        return self.segment.address + self.offset
