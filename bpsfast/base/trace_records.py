"""Reads native trace records (``pyx/record.h``) as spans: what a process did or waited for, from when to when.

A record is 32 bytes, little endian: u64 begin_ns, u64 end_ns (CLOCK_MONOTONIC), u32 part, u32 round, u16 kind,
u16 thread, u32 nbytes.
"""
from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .settings import Settings

#: Most partitions of a job, as in ``pyx/board.h``.
MAX_PARTS = 65_536
RECORD = struct.Struct("<QQIIHHI")

#: Kind of record -> its name, and whether records may overlap without limit (then they get no row).
KINDS: dict[int, tuple[str, bool]] = {
    1: ("copy", False),  # a rank copies a partition into shared memory
    2: ("queue", True),  # its inputs are complete, but no thread is free to sum them
    3: ("sum", False),
    4: ("wire", True),  # from being passed to the link until the peer has acknowledged it
    5: ("wait", False),  # a rank waits for a result
    6: ("deliver", False),  # a rank copies a result out
    7: ("gather", True),  # from the first input to the last
    8: ("receive", False),  # from the header to the last byte
    9: ("push", False),  # a rank announces inputs that need no copy
    10: ("apply", False),  # a push is applied to weights that the owner stores, under their lock
    11: ("answer", False),  # the weights are copied for a worker
    12: ("to host", True),  # copied from a device to the host; several may be in flight
    13: ("to device", True),  # copied back
    14: ("direct", False),  # a rank sums a tensor with the other ranks of its machine; `round` counts all its pushes
}
#: From when a write is ready until it is passed to the link: it waits for more urgent ones and for credit.
CREDIT = "credit"
#: Keys of a span's `args` besides part and round.
DETAILS: dict[str, tuple[str, ...]] = {
    CREDIT: ("peer", "nbytes", "pass", "order"), "wire": ("peer", "nbytes"), "receive": ("peer", "nbytes"),
    "push": ("partitions",), "sum": ("thread", "nbytes"), "direct": ("nbytes",),
    "apply": ("thread", "nbytes"), "answer": ("thread", "nbytes")}
_OVERLAPPING = {name for name, overlaps in KINDS.values() if overlaps} | {CREDIT}
_WIRE, _RECEIVE, _PUSH = 4, 8, 9
_OF_THREADS = (3, 10, 11)


class Limits(NamedTuple):
    """Which records are kept, with the argument names of all native classes that keep records.

    Last round 0: until the end of the job.
    """

    trace_capacity: int = 0
    trace_first_round: int = 1
    trace_last_round: int = 0


def limits(settings: Settings) -> Limits:
    """Return the limits that *settings* ask for; capacity 0 without ``trace_dir``."""
    return Limits(settings.trace_capacity if settings.trace_dir else 0, settings.trace_first_step,
                  settings.trace_last_step)


class Part(NamedTuple):
    """The name of a partition, its owner (index of a node), its urgency (0 is first; -1: unknown)."""

    tensor: str
    partition: int = 0
    n_partitions: int = 1
    owner: int = -1
    urgency: int = -1

    @property
    def title(self) -> str:
        """The name in events and texts."""
        tensor = printable(self.tensor)
        return f"{tensor}[{self.partition}]" if self.n_partitions > 1 else tensor


def printable(name: str) -> str:
    """Return *name*, the user's name for a tensor, as one line."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in name)


class Span(NamedTuple):
    """Work or waiting from `begin_ns` to `end_ns`. `args` has part, round, nbytes and details."""

    begin_ns: int
    end_ns: int
    kind: str
    args: dict[str, Any]

    @property
    def overlaps(self) -> bool:
        """Whether spans of this kind may overlap without limit."""
        return self.kind in _OVERLAPPING

    @property
    def covered(self) -> range:
        """The partitions that the span concerns."""
        return range(self.args["part"], self.args["part"] + min(self.args.get("partitions", 1), MAX_PARTS))

    @property
    def key(self) -> tuple[int, int]:
        """Part and round."""
        return self.args["part"], self.args["round"]


def spans(records: bytes, peers: Mapping[int, int]) -> Iterator[Span]:
    """Yield the spans of *records*; *peers* gives the node behind each source id.

    An incomplete record at the end is dropped, as is one that ends before it begins (the process ended while writing
    it).
    """
    whole = len(records) - len(records) % RECORD.size
    for begin_ns, end_ns, part, round_, kind, thread, nbytes in RECORD.iter_unpack(memoryview(records)[:whole]):
        if end_ns < begin_ns:
            continue
        args = {"part": part, "round": round_, "partitions" if kind == _PUSH else "nbytes": nbytes}
        if kind in (_WIRE, _RECEIVE):
            args["peer"] = peers.get(thread, -1)
        elif kind in _OF_THREADS:
            args["thread"] = thread
        yield Span(begin_ns, end_ns, KINDS[kind][0] if kind in KINDS else f"kind {kind}", args)


_ORDER_BITS = 32


class SendLog:
    """Records writes within `Limits`. Written by one thread; read after that has ended."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._last = limits.trace_last_round or float("inf")
        self._rows: list[tuple[int, int, int, int, int, int, int]] = []

    @property
    def full(self) -> bool:
        """Whether records may have been dropped."""
        return len(self._rows) >= self._limits.trace_capacity

    def add(self, since_ns: int, posted_ns: int, source: int, part: int, round_: int, nbytes: int, order: int) -> None:
        """Record that a write to *source* was ready at *since_ns* and left at *posted_ns*; *order*: of `WriteOrder`."""
        if self._limits.trace_first_round <= round_ <= self._last and not self.full:
            self._rows.append((since_ns, posted_ns, source, part, round_, nbytes, order))

    def spans(self, peers: Mapping[int, int]) -> Iterator[Span]:
        """Yield the recorded writes as spans; *peers* gives the node behind each source id."""
        for since_ns, posted_ns, source, part, round_, nbytes, order in self._rows:
            yield Span(since_ns, posted_ns, CREDIT, {
                "part": part, "round": round_, "nbytes": nbytes, "peer": peers.get(source, -1),
                "pass": order >> _ORDER_BITS, "order": order & ((1 << _ORDER_BITS) - 1)})
