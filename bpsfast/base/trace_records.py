"""Native trace records (``pyx/record.h``) as spans.

A record is 32 bytes, little endian: u64 begin_ns, u64 end_ns (CLOCK_MONOTONIC), u32 part, u32 round, u16 kind,
u16 thread, u32 nbytes.
"""
from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .settings import Settings

#: As in ``pyx/board.h``: no job has more partitions.
MAX_PARTS = 65_536
RECORD = struct.Struct("<QQIIHHI")

#: Kind of record -> its name, and whether any number of them may overlap, which no row of slices can show.
KINDS: dict[int, tuple[str, bool]] = {
    1: ("copy", False),  # a rank copies a partition into shared memory
    2: ("queue", True),  # its inputs are there, and no thread is free to sum them
    3: ("sum", False),
    4: ("wire", True),  # from being handed to the link until the peer has acknowledged it
    5: ("wait", False),  # a rank waits for a result
    6: ("deliver", False),  # a rank copies a result out
    7: ("gather", True),  # from the first input to the last
    8: ("receive", False),  # from the header to the last byte
    9: ("push", False),  # a rank announces inputs that need no copy
    10: ("apply", False),  # a push is applied to the weights that its owner keeps: under their lock, as the next
    11: ("answer", False),  # they are copied for a worker
    12: ("to host", True),  # copied from a device to the host: while one lands the next flies
    13: ("to device", True),  # copied back
}
#: From when a write could leave until it was handed to the link: it waited for more urgent ones and for credit.
CREDIT = "credit"
#: What the `args` of a span have besides part and round.
DETAILS: dict[str, tuple[str, ...]] = {
    CREDIT: ("peer", "nbytes", "pass", "order"), "wire": ("peer", "nbytes"), "receive": ("peer", "nbytes"),
    "push": ("partitions",), "sum": ("thread", "nbytes"), "apply": ("thread", "nbytes"), "answer": ("thread", "nbytes"),
}
_OVERLAPPING = {name for name, overlaps in KINDS.values() if overlaps} | {CREDIT}
_WIRE, _RECEIVE, _PUSH = 4, 8, 9
_OF_THREADS = (3, 10, 11)


class Limits(NamedTuple):
    """What is kept of a process, named as the arguments of all native classes that keep records.

    The last round 0: to the end of the job.
    """

    trace_capacity: int = 0
    trace_first_round: int = 1
    trace_last_round: int = 0


def limits(settings: Settings) -> Limits:
    """Return what *settings* ask to be kept; a capacity of 0 without ``trace_dir``."""
    return Limits(settings.trace_capacity if settings.trace_dir else 0, settings.trace_first_step,
                  settings.trace_last_step)


class Part(NamedTuple):
    """What a partition is called, who owns it (a node's index), its urgency (0 is first; -1: not known here)."""

    tensor: str
    partition: int = 0
    n_partitions: int = 1
    owner: int = -1
    urgency: int = -1

    @property
    def title(self) -> str:
        """What it is called in names of events and in lines for people."""
        tensor = printable(self.tensor)
        return f"{tensor}[{self.partition}]" if self.n_partitions > 1 else tensor


def printable(name: str) -> str:
    """Return the user's *name* for a tensor on one line, whatever is in it."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in name)


class Span(NamedTuple):
    """Work, or waiting, from `begin_ns` to `end_ns`. `args` have part, round, nbytes, and what else there is."""

    begin_ns: int
    end_ns: int
    kind: str
    args: dict[str, Any]

    @property
    def overlaps(self) -> bool:
        """Whether any number of its kind may overlap."""
        return self.kind in _OVERLAPPING

    @property
    def covered(self) -> range:
        """The partitions that it is about."""
        return range(self.args["part"], self.args["part"] + min(self.args.get("partitions", 1), MAX_PARTS))

    @property
    def key(self) -> tuple[int, int]:
        """Part and round."""
        return self.args["part"], self.args["round"]


def spans(records: bytes, peers: Mapping[int, int]) -> Iterator[Span]:
    """Yield the spans of *records*; *peers* gives the node behind each source. Half a record at the end is left out.

    A record that ends before it begins was being written when the process ended, and is left out too.
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
