"""Arrivals: sums on their way from the host to a device, each partition as soon as it is complete.

Whoever wants the sum lets the stream he works on wait for the copies; the host waits for none.
"""
from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from .copies import CopyThread, ResultCopy
from .device import Device, Event, OwnStream, Stream
from .partition_copy import PartitionCopy

#: Where nothing is complete the thread waits for the oldest partition, so long, before it looks for others.
_LOOK_S = 0.001
#: Of so many partitions of a unit is looked which are complete: they mostly complete in order.
_SIGHT = 32


class CopyToDevice(ResultCopy):
    """*pieces* of a unit's sum, copied to a device after the events *after*. Over once all copies are enqueued: `event`
    is where they are done.

    Parameters
    ----------
    source
        Returns where the sum's bytes from an offset on lie on the host, or the device.
    on_device
        The pieces, by number, of which they lie on the device: a card has written them there.
    wait
        Waits up to so many seconds for a partition, by its number; whether it is complete. Raises when it never will
        be.
    landed
        Called with each piece that is there, and when its copies began (ns).
    keeps
        Holds the memory that they go to.
    whole
        Is over once all *pieces* are complete; else those of which nothing is copied are not waited for.
    """

    def __init__(self, title: str, urgency: int, pieces: Sequence[PartitionCopy], after: Sequence[Event],
                 source: Callable[[int], int], wait: Callable[[int, float], bool],
                 landed: Callable[[PartitionCopy, int], None], keeps: object, whole: bool = False,
                 on_device: Collection[int] = ()) -> None:
        super().__init__(title, urgency, keeps)
        self.left = {piece.number: piece for piece in pieces if whole or piece.copies}
        self.after = after
        self.source = source
        self.on_device = on_device
        self.wait_for = wait
        self.landed = landed
        self.copying: deque[tuple[Event, PartitionCopy, int]] = deque()
        self._stream: Stream | None = None
        self._own: OwnStream | None = None
        self._arrived = threading.Event()

    @property
    def is_finished(self) -> bool:
        """Whether nothing of the sum is read for it any more: it is on the device, or never will be."""
        return self._arrived.is_set()

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait for that so long at most; return whether it is so."""
        return self._arrived.wait(timeout_s)

    def stream(self, device: Device, shared: Stream) -> Stream:
        """Return the stream for its copies: the *shared* one, unless they had to wait there for what its owner has
        enqueued, and others for them.
        """
        if self._stream is None:
            if not all(event.done() for event in self.after):
                self._own = device.stream()
                for event in self.after:
                    self._own.wait(event)
            self._stream = self._own or shared
        return self._stream

    @property
    def is_apart(self) -> bool:
        """Whether its copies wait for what somebody else has enqueued."""
        return self._own is not None

    def drain(self) -> None:
        """Wait for its own stream, if it has one."""
        if self._own is not None:
            with contextlib.suppress(Exception):  # as `Line._drain`
                self._own.record().wait()

    def release_memory(self) -> None:
        """As `DeviceCopy.release_memory`."""
        super().release_memory()
        self._arrived.set()
        if self._own is not None:
            self._own.close()
            self._own = None


class ToDeviceCopier(CopyThread[CopyToDevice]):
    """The line from the host to a device."""

    def _bring(self, under_way: list[CopyToDevice], stream: Stream) -> list[CopyToDevice]:
        moved = False
        for arrival in under_way:
            if arrival.is_over and arrival.has_failed:  # whoever ended it wants no more of it
                arrival.left.clear()
        for arrival in sorted(under_way, key=lambda arrival: arrival.urgency):
            complete = [piece for piece in itertools.islice(arrival.left.values(), _SIGHT)
                        if arrival.wait_for(piece.number, 0.0)]
            if arrival.on_device and any(piece.number in arrival.on_device and piece.copies for piece in complete):
                self._device.flush_remote_writes()
            for piece in complete:
                _copy(arrival, piece, arrival.stream(self._device, stream))
                moved = True
            if not arrival.left and not arrival.is_over:
                arrival.event = arrival.stream(self._device, stream).record()
                arrival.end()
        if not moved:
            self._wait(under_way)
        return [arrival for arrival in under_way if not _has_arrived(arrival)]

    def _wait(self, under_way: list[CopyToDevice]) -> None:
        """Wait a moment for a partition, or for copies."""
        for arrival in under_way:
            if arrival.left:
                arrival.wait_for(next(iter(arrival.left)), _LOOK_S)
                return
        for arrival in under_way:
            if arrival.copying and not arrival.is_apart:  # what comes now is copied after it anyway
                arrival.copying[0][0].wait()
                return
        self._nap()

    def _drain(self, left: list[CopyToDevice], stream: Stream) -> None:
        super()._drain(left, stream)
        for arrival in left:
            arrival.drain()


def _copy(arrival: CopyToDevice, piece: PartitionCopy, stream: Stream) -> None:
    begin_ns = time.monotonic_ns()
    for load in piece.copies:
        if piece.number in arrival.on_device:
            stream.move(load.address, arrival.source(load.offset), load.nbytes)
        else:
            stream.copy(load.address, arrival.source(load.offset), load.nbytes, to_host=False)
    del arrival.left[piece.number]
    arrival.copying.append((stream.record(), piece, begin_ns))


def _has_arrived(arrival: CopyToDevice) -> bool:
    """Tell of the pieces that have got there; return whether all have."""
    while arrival.copying and arrival.copying[0][0].done():
        _, piece, begin_ns = arrival.copying.popleft()
        arrival.landed(piece, begin_ns)
    if arrival.copying or arrival.left:
        return False
    arrival.release_memory()
    return True
