"""Departures: units on their way from a device to the host, partition by partition, each announced as it lands.

A hook of the backward pass only adds a departure: copies wait on their own stream for what was enqueued before, so the
training's stream goes on. A few partitions are in the air at a time, for a full link: what is more urgent takes off
before the rest (ByteScheduler's credit, here of PCIe).
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .device import Device, Event, Stream
from .line import Line, Passage
from .pieces import Piece

#: So much is in the air at once, and at least so many partitions: one lands while the other flies.
_WINDOW_NBYTES = 8 << 20
_LEAST_PIECES = 2


class Departure(Passage):
    """*pieces* of a unit, copied to the host's memory at *address* after the events *after*; *announce* is called with
    each as it lands, and with when its copies began (ns). *keeps* holds the memory they come from.
    """

    def __init__(self, title: str, urgency: int, address: int, pieces: Sequence[Piece], after: Sequence[Event],
                 announce: Callable[[Piece, int], None], keeps: object) -> None:
        super().__init__(title, urgency)
        self.address = address
        self.pieces = pieces
        self.after = after
        self.announce = announce
        self.keeps = keeps
        self.n_taken_off = 0
        self.n_landed = 0
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether copies that are enqueued now begin at once."""
        if not self._is_ready:
            self._is_ready = all(event.done() for event in self.after)
        return self._is_ready


class _Flight(NamedTuple):
    landed: Event
    departure: Departure
    piece: Piece
    begin_ns: int


class Departures(Line[Departure]):
    """The line from a device to the host."""

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(device, name)
        self._flights: deque[_Flight] = deque()

    def _bring(self, under_way: list[Departure], stream: Stream) -> list[Departure]:
        flights = self._flights
        while len(flights) < _LEAST_PIECES or sum(flight.piece.nbytes for flight in flights) < _WINDOW_NBYTES:
            departure = _next(under_way)
            if departure is None:
                break
            flights.append(_take_off(departure, stream))
        if flights:
            flight = flights.popleft()
            flight.landed.wait()
            flight.departure.announce(flight.piece, flight.begin_ns)
            flight.departure.n_landed += 1
        rest = []
        for departure in under_way:
            if departure.n_landed < len(departure.pieces):
                rest.append(departure)
            else:
                departure.keeps = None
                departure.end()
        return rest


def _next(under_way: Sequence[Departure]) -> Departure | None:
    """Return whose partition takes off next: the most urgent that can fly at once, else the first that was added."""
    waiting = [departure for departure in under_way if departure.n_taken_off < len(departure.pieces)]
    ready = [departure for departure in waiting if departure.is_ready]
    if ready:
        return min(ready, key=lambda departure: departure.urgency)
    return waiting[0] if waiting else None


def _take_off(departure: Departure, stream: Stream) -> _Flight:
    if departure.n_taken_off == 0:
        for event in departure.after:
            stream.wait(event)
    piece = departure.pieces[departure.n_taken_off]
    begin_ns = time.monotonic_ns()
    for load in piece.copies:
        stream.copy(departure.address + load.offset, load.address, load.nbytes, to_host=True)
    departure.n_taken_off += 1
    return _Flight(stream.record(), departure, piece, begin_ns)
