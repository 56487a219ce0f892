"""Departures: units on their way from a device to the host, partition by partition, each announced as it lands.

A hook of the backward pass only adds a departure; the training's stream goes on. What is copied was computed already
when its copies are enqueued: a stream that stands still (for another rank, maybe, which waits for a sum of ours) keeps
up what was computed on it, and nothing else. A few partitions are in the air at a time, for a full link: what is more
urgent takes off before the rest (ByteScheduler's credit, here of PCIe).
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from .copies import CopyThread, DeviceCopy
from .copy_to_device import CopyToDevice
from .device import Device, Event, Stream
from .partition_copy import PartitionCopy

#: So much is in the air at once, and at least so many partitions: one lands while the other flies.
_WINDOW_NBYTES = 8 << 20
_LEAST_PIECES = 2
#: Of a unit of which nothing goes straight to a card.
NOWHERE: Mapping[int, int] = MappingProxyType({})


class CopyToHost(DeviceCopy):
    """*pieces* of a unit, copied to the host's memory at *address* after the events *after*, and once *readers* of what
    comes of it have done with what was there before; *announce* is called with each as it lands, and with when its
    copies began (ns). *keeps* holds the memory they come from. *on_device*: pieces by their number that are copied
    within the device, as if the unit lay at that address: a card takes them from there.
    """

    def __init__(self, title: str, urgency: int, address: int, pieces: Sequence[PartitionCopy], after: Sequence[Event],
                 announce: Callable[[PartitionCopy, int], None], keeps: object, readers: Sequence[CopyToDevice] = (),
                 on_device: Mapping[int, int] = NOWHERE) -> None:
        super().__init__(title, urgency, keeps)
        self.address = address
        self.on_device = on_device
        self.pieces = pieces
        self.announce = announce
        self.n_taken_off = 0
        self.n_landed = 0
        self._after = deque(after)
        self._readers = deque(readers)

    def is_ready(self, behind: set[Hashable]) -> bool:
        """Return whether copies that are enqueued now begin at once; enter into *behind* the origin of an event for
        which they do not: later ones of it are not asked.
        """
        while self._after:
            origin = self._after[0].origin
            if origin in behind:
                return False
            if not self._after[0].done():
                behind.add(origin)
                return False
            self._after.popleft()
        while self._readers and self._readers[0].is_finished:
            self._readers.popleft()
        return not self._readers


class _Flight(NamedTuple):
    landed: Event
    departure: CopyToHost
    piece: PartitionCopy
    begin_ns: int


class ToHostCopier(CopyThread[CopyToHost]):
    """The line from a device to the host."""

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(device, name)
        self._flights: deque[_Flight] = deque()
        self._nbytes = 0  # in the air

    def _bring(self, under_way: list[CopyToHost], stream: Stream) -> list[CopyToHost]:
        flights = self._flights
        ready = _ready(under_way)
        while ready and (len(flights) < _LEAST_PIECES or self._nbytes < _WINDOW_NBYTES):
            departure = min(ready, key=lambda departure: departure.urgency)  # the first that was added of equal ones
            flight = _take_off(departure, stream)
            flights.append(flight)
            self._nbytes += flight.piece.nbytes
            if departure.n_taken_off == len(departure.pieces):
                ready.remove(departure)
        if not flights:
            self._nap()
            return under_way
        flight = flights.popleft()
        flight.landed.wait()
        self._nbytes -= flight.piece.nbytes
        departure = flight.departure
        departure.announce(flight.piece, flight.begin_ns)
        departure.n_landed += 1
        if departure.n_landed < len(departure.pieces):
            return under_way
        departure.release_memory()
        departure.end()
        return [each for each in under_way if each is not departure]


def _ready(under_way: Sequence[CopyToHost]) -> list[CopyToHost]:
    """Return those whose partitions can take off."""
    behind: set[Hashable] = set()
    return [departure for departure in under_way
            if departure.n_taken_off < len(departure.pieces) and departure.is_ready(behind)]


def _take_off(departure: CopyToHost, stream: Stream) -> _Flight:
    piece = departure.pieces[departure.n_taken_off]
    begin_ns = time.monotonic_ns()
    straight = departure.on_device.get(piece.number)
    for load in piece.copies:
        if straight is None:
            stream.copy(departure.address + load.offset, load.address, load.nbytes, to_host=True)
        else:
            stream.move(straight + load.offset, load.address, load.nbytes)
    departure.n_taken_off += 1
    return _Flight(stream.record(), departure, piece, begin_ns)
