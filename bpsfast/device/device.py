"""What a device can do, as those see it who bring gradients from it and back. Nothing here waits for other ranks.

Work on a stream is done in its order, beside the host's program. An event is a place in that order. The terms, and all
rules, are CUDA's; `host` has a device without a GPU that keeps them.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol


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


class OwnStream(Stream, Protocol):
    """A stream that was made here."""

    def close(self) -> None:
        """Let go of it: after what is enqueued it does nothing any more. Idempotent; raises nothing."""


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


@dataclass(frozen=True)
class Place:
    """Where an array on a device lies in its owner's order of things.

    Its bytes are read, and written, after `ready`. `caller` returns the stream on which its owner works now: what is
    enqueued there after a call finds the result.
    """

    device: Device
    ready: Event
    caller: Callable[[], Stream]
