"""Arrivals: sums on their way from the host to a device, each partition as soon as it is complete.

Whoever wants the sum lets the stream he works on wait for the copies; the host waits for none.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .device import Event, Stream
from .line import Line, Passage
from .pieces import Piece

#: Where nothing is complete the thread waits for the oldest partition, so long, before it looks for others.
_LOOK_S = 0.001


class Arrival(Passage):
    """*pieces* of a unit's sum, copied to a device after the events *after*. Over once all copies are enqueued: `event`
    is where they are done.

    Parameters
    ----------
    source
        Returns where the sum's bytes from an offset on lie on the host.
    wait
        Waits up to so many seconds for a partition, by its number; whether it is complete. Raises when it never will
        be.
    landed
        Called with each piece that is there, and when its copies began (ns).
    keeps
        Holds the memory that they go to.
    """

    def __init__(self, title: str, urgency: int, pieces: Sequence[Piece], after: Sequence[Event],
                 source: Callable[[int], int], wait: Callable[[int, float], bool],
                 landed: Callable[[Piece, int], None], keeps: object) -> None:
        super().__init__(title, urgency)
        self.left = list(pieces)
        self.after = after
        self.source = source
        self.wait_for = wait
        self.landed = landed
        self.keeps = keeps
        self.event: Event | None = None
        self.has_begun = False
        self.copying: list[tuple[Event, Piece, int]] = []


class Arrivals(Line[Arrival]):
    """The line from the host to a device."""

    def _bring(self, under_way: list[Arrival], stream: Stream) -> list[Arrival]:
        moved = False
        for arrival in sorted(under_way, key=lambda arrival: arrival.urgency):
            for piece in [piece for piece in arrival.left if arrival.wait_for(piece.number, 0.0)]:
                _copy(arrival, piece, stream)
                moved = True
            if not arrival.left and arrival.event is None:
                arrival.event = stream.record()
                arrival.end()
        if not moved:
            waiting = next((arrival for arrival in under_way if arrival.left), None)
            if waiting is not None:
                waiting.wait_for(waiting.left[0].number, _LOOK_S)
            else:
                event = under_way[0].event  # new ones would be copied after it anyway
                assert event is not None, "nothing is left of it, so it was recorded"
                event.wait()
        return [arrival for arrival in under_way if not _is_there(arrival)]


def _copy(arrival: Arrival, piece: Piece, stream: Stream) -> None:
    if not arrival.has_begun:
        arrival.has_begun = True
        for event in arrival.after:
            stream.wait(event)
    begin_ns = time.monotonic_ns()
    for load in piece.copies:
        stream.copy(load.address, arrival.source(load.offset), load.nbytes, to_host=False)
    arrival.left.remove(piece)
    arrival.copying.append((stream.record(), piece, begin_ns))


def _is_there(arrival: Arrival) -> bool:
    """Tell of the pieces that have got there; return whether all have."""
    while arrival.copying and arrival.copying[0][0].done():
        _, piece, begin_ns = arrival.copying.pop(0)
        arrival.landed(piece, begin_ns)
    if arrival.copying or arrival.left:
        return False
    arrival.keeps = None
    return True
