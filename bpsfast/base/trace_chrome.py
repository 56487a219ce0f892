"""Spans as events of Chrome's Trace Event Format, as Perfetto and chrome://tracing show them.

What happens one after the other becomes complete events (``X``) in rows, each the ``tid`` of a thread that need not be
one: where two threads of a rank copied at once there are two rows, as slices of a row must not overlap. Only to such
slices can arrows be bound. What overlaps without bound becomes pairs of asynchronous events (``b``, ``e``).
"""
from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .trace_records import Part, Span

#: Viewers cut times to whole nanoseconds: what is nearer than this might overlap there, and what is shorter vanish.
_GAP_NS = 2
#: Of two events of one time: a slice comes before the arrows that are bound to it.
_PHASES = {"M": 0, "e": 1, "X": 2, "b": 3}
_LAST_PHASE = 4


class Slice(NamedTuple):
    """A span in its place: `pid` and `tid` of the events."""

    pid: int
    tid: int
    span: Span


class Rows:
    """Gives spans of one process rows in which nothing overlaps. Spans come in the order of their beginnings."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[int, int]]] = {}
        self.names: dict[int, str] = {}

    def place(self, title: str, begin_ns: int, end_ns: int) -> int:
        """Return the row: the first of those with this *title* that is free."""
        rows = self._rows.setdefault(title, [])
        number = next((i for i, (_, free_ns) in enumerate(rows) if free_ns <= begin_ns), len(rows))
        if number == len(rows):
            rows.append((len(self.names) + 1, 0))
            self.names[len(self.names) + 1] = title if number == 0 else f"{title} ({number + 1})"
        tid, _ = rows[number]
        rows[number] = tid, max(end_ns, begin_ns + _GAP_NS) + _GAP_NS
        return tid


def place(spans: Iterable[Span], pid: int) -> tuple[list[Slice], dict[int, str]]:
    """Return *spans* in the order of time, each in its row (0: asynchronous), and the names of the rows."""
    rows = Rows()
    placed = [Slice(pid, 0 if span.overlaps else rows.place(_title(span), span.begin_ns, span.end_ns), span)
              for span in sorted(spans, key=lambda span: (span.begin_ns, span.end_ns))]
    return placed, rows.names


def _title(span: Span) -> str:
    if span.kind in ("sum", "apply", "answer"):
        return f"sum {span.args.get('thread', 0)}"
    if span.kind == "receive":
        return f"from node {span.args.get('peer', -1)}"
    return "calls"


def titles(pid: int, role: str, rows: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yield the metadata events of one process."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": role}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, name in rows.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def events(slices: Iterable[Slice], parts: Mapping[int, Part], base_ns: int, *, full: bool) -> Iterator[dict[str, Any]]:
    """Yield the events of *slices*, *base_ns* being time 0; *full*: with all that is known of the partition."""
    for number, (pid, tid, span) in enumerate(slices):
        part = parts.get(span.args["part"], Part(f"part {span.args['part']}"))
        args = span.args
        if full:
            args = {"tensor": part.tensor, "partition": part.partition, "urgency": part.urgency, **args}
        common = {"name": f"{span.kind} {part.title}", "cat": span.kind, "pid": pid, "tid": tid}
        begin = {**common, "ts": micros(span.begin_ns - base_ns), "args": args}
        length_ns = max(span.end_ns - span.begin_ns, _GAP_NS)
        if tid:
            yield {**begin, "ph": "X", "dur": micros(length_ns)}
        else:
            yield {**begin, "ph": "b", "id": f"{pid}.{number}"}
            yield {**common, "ph": "e", "id": f"{pid}.{number}", "ts": micros(span.begin_ns + length_ns - base_ns)}


def micros(nanoseconds: int) -> float:
    """Return microseconds, the format's unit; exact while the time is below a hundred days."""
    return nanoseconds / 1000


def dump(path: Path, found: Iterable[dict[str, Any]], other: Mapping[str, Any]) -> int:
    """Write *found*, one event a line, beside *path* and move it there: a reader never sees half. Return how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    number = 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write('{"otherData": ' + json.dumps(other) + ',\n"displayTimeUnit": "ms",\n"traceEvents": [')
            for number, event in enumerate(found, start=1):
                file.write(("\n" if number == 1 else ",\n") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return number


def in_order(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events by time; metadata first, and slices before what is bound to them."""
    return sorted(found, key=lambda event: (event.get("ts", -1.0), _PHASES.get(event["ph"], _LAST_PHASE)))
