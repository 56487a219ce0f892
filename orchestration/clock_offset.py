"""Estimates how far another machine's clock is ahead of this one's, as NTP does (Mills, RFC 5905).

A request leaves at `sent_ns`, is read at `there_ns` of the other clock, and the reply is read here at `received_ns`.
Then the other clock is ahead by ``there - (sent + received) / 2``, with an error of at most half the round trip.
Samples of the shortest round trip are best, but clocks drift: so one sample is kept for each stretch of time, and the
offset is interpolated between them.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

#: Least time between two points, so that the error of a round trip does not look like a jump of the clock. Doubled
#: whenever there are more than `_MAX_POINTS`.
_STRETCH_NS = 8_000_000_000
_MAX_POINTS = 64
#: Assumed drift between two clocks beyond the samples: twice that of a bad quartz.
DRIFT = 100e-6
#: Rounding error of seconds as floats, after a year without a reboot.
_ROUNDING_NS = 8


class Point(NamedTuple):
    """At `at_ns` of this clock the other one was ahead by `offset_ns`, plus or minus `uncertainty_ns`."""

    at_ns: int
    offset_ns: int
    uncertainty_ns: int


class ClockOffset:
    """Collects samples. Owner thread only."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._stretch_ns = _STRETCH_NS
        self.n_samples = 0

    @property
    def points(self) -> tuple[Point, ...]:
        """The best sample of each stretch, in order of time; see `offset_at`."""
        return tuple(self._points)

    def sample(self, sent_ns: int, there_ns: int, received_ns: int) -> None:
        """Add one request and its reply. Ignore a reply from before the request."""
        if not 0 <= sent_ns <= received_ns:
            return
        self.n_samples += 1
        middle_ns = (sent_ns + received_ns) // 2
        self._add(Point(middle_ns, there_ns - middle_ns, (received_ns - sent_ns + 1) // 2 + _ROUNDING_NS))
        if len(self._points) > _MAX_POINTS:
            self._stretch_ns *= 2
            points, self._points = self._points, []
            for point in points:
                self._add(point)

    def _add(self, point: Point) -> None:
        last = self._points[-1] if self._points else None
        if last is None or point.at_ns - last.at_ns >= self._stretch_ns:
            self._points.append(point)
        elif point.uncertainty_ns < last.uncertainty_ns:
            self._points[-1] = point


def offset_at(points: Sequence[Point], at_ns: int) -> tuple[int, int]:
    """Return (offset, uncertainty) in nanoseconds at *at_ns* of this clock. *points*: `ClockOffset.points`, not empty.

    Between two points both are interpolated. Beyond the first and the last point the uncertainty grows by `DRIFT`.
    """
    after = bisect_right(points, at_ns, key=lambda point: point.at_ns)
    if 0 < after < len(points):
        a, b = points[after - 1], points[after]
        share = (at_ns - a.at_ns) / (b.at_ns - a.at_ns)
        return (a.offset_ns + round(share * (b.offset_ns - a.offset_ns)),
                1 + round(a.uncertainty_ns + share * (b.uncertainty_ns - a.uncertainty_ns)))
    nearest = points[0] if after == 0 else points[-1]
    return nearest.offset_ns, nearest.uncertainty_ns + round(DRIFT * abs(at_ns - nearest.at_ns))
