"""Sends: when each write of a node could leave and when it did, as the communication service saw it."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

from .trace_records import CREDIT, Limits, Span

_ORDER_BITS = 32


class SendLog:
    """Keeps what `Limits` ask for. Written by one thread, read when that has ended."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._last = limits.trace_last_round or float("inf")
        self._rows: list[tuple[int, int, int, int, int, int, int]] = []

    @property
    def full(self) -> bool:
        """Whether there may have been more."""
        return len(self._rows) >= self._limits.trace_capacity

    def add(self, since_ns: int, posted_ns: int, source: int, part: int, round_: int, nbytes: int, order: int) -> None:
        """Note that a write to *source* could leave at *since_ns* and did at *posted_ns*; *order*: of `WriteOrder`."""
        if self._limits.trace_first_round <= round_ <= self._last and not self.full:
            self._rows.append((since_ns, posted_ns, source, part, round_, nbytes, order))

    def spans(self, peers: Mapping[int, int]) -> Iterator[Span]:
        """Yield what was noted; *peers* gives the node behind each source."""
        for since_ns, posted_ns, source, part, round_, nbytes, order in self._rows:
            yield Span(since_ns, posted_ns, CREDIT, {
                "part": part, "round": round_, "nbytes": nbytes, "peer": peers.get(source, -1),
                "pass": order >> _ORDER_BITS, "order": order & ((1 << _ORDER_BITS) - 1)})
