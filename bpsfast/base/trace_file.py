"""Writes and reads the trace file of a process, in Chrome's Trace Event Format.

Consecutive spans become complete events (``X``) in rows, each the ``tid`` of a virtual thread; where two threads of a
rank copied at once there are two rows, as slices of a row must not overlap. Only such slices can carry arrows. Spans
that may overlap become pairs of asynchronous events (``b``, ``e``).
"""
from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..orchestration.clock_offset import Point
from ..orchestration.errors import ConfigError
from .process_identity import boot_id
from .trace_records import DETAILS, Part, Span, spans

#: Viewers round times to nanoseconds: closer slices might overlap there, and shorter ones vanish.
_GAP_NS = 2
#: Order of events at one time: a slice precedes the arrows bound to it.
_PHASES = {"M": 0, "e": 1, "X": 2, "b": 3}
_LAST_PHASE = 4


class Slice(NamedTuple):
    """A span and the `pid` and `tid` of its events."""

    pid: int
    tid: int
    span: Span


class Rows:
    """Assigns spans of one process to rows without overlap. Spans come in order of their beginnings."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[int, int]]] = {}
        self.names: dict[int, str] = {}

    def place(self, title: str, begin_ns: int, end_ns: int) -> int:
        """Return the first free row with this *title*."""
        rows = self._rows.setdefault(title, [])
        number = next((i for i, (_, free_ns) in enumerate(rows) if free_ns <= begin_ns), len(rows))
        if number == len(rows):
            rows.append((len(self.names) + 1, 0))
            self.names[len(self.names) + 1] = title if number == 0 else f"{title} ({number + 1})"
        tid, _ = rows[number]
        rows[number] = tid, max(end_ns, begin_ns + _GAP_NS) + _GAP_NS
        return tid


def place(spans: Iterable[Span], pid: int) -> tuple[list[Slice], dict[int, str]]:
    """Return *spans* in order of time with their rows (0: asynchronous), and the names of the rows."""
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
    """Yield the events of *slices*, with *base_ns* as time 0; *full*: with all details of the partition."""
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
    """Return microseconds, the unit of the format; exact below a hundred days."""
    return nanoseconds / 1000


def dump(path: Path, found: Iterable[dict[str, Any]], other: Mapping[str, Any]) -> int:
    """Write *found* to *path*, one event per line, atomically; return their number."""
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
    """Return events by time: metadata first, and slices before what is bound to them."""
    return sorted(found, key=lambda event: (event.get("ts", -1.0), _PHASES.get(event["ph"], _LAST_PHASE)))


FORMAT = "bpsfast process 1"
PATTERN = "*.trace.json"


class Origin(NamedTuple):
    """The origin of records.

    `node`: index of the process's node; `rank`: -1 for the node itself. Of nodes: `clock`, known points of the
    scheduler's clock; `peers`, the node behind each source id; `credit_nbytes`, most bytes in flight to a peer. `full`:
    records may have been dropped.
    """

    node: int = -1
    rank: int = -1
    clock: tuple[Point, ...] = ()
    peers: Mapping[int, int] = {}
    credit_nbytes: int = 0
    full: bool = False


_NOWHERE = Origin()


class Process(msgspec.Struct, kw_only=True):
    """One process of a job, as read from its file. `clock_id` identifies its CLOCK_MONOTONIC."""

    format: str
    role: str
    pid: int
    base_ns: int
    node: int
    rank: int
    clock: tuple[tuple[int, int, int], ...]
    clock_id: str
    credit_nbytes: int
    full: bool
    parts: dict[int, tuple[str, int, int, int, int]]
    spans: list[Span] = []
    path: str = ""


def write(folder: str | Path, role: str, records: bytes, parts: Mapping[int, Part] | None = None,
          origin: Origin = _NOWHERE, sends: Iterable[Span] = ()) -> Path:
    """Write the spans of this process to ``<folder>/<role>-<pid>.trace.json`` and return that path.

    *role* is the title of the process: "node 0", "rank 3". *records* are the concatenated native records of
    `Engine.trace`, `Stream.trace` and `Port.trace`. *parts* names partitions; others are shown by number. *sends* are
    the spans of `SendLog.spans`.
    """
    folder, parts, pid = Path(folder), parts or {}, os.getpid()
    found = [*spans(records, origin.peers), *sends]
    base_ns = min((span.begin_ns for span in found), default=0)
    slices, rows = place(found, pid)
    used = {number for span in found for number in span.covered}
    path = folder / f"{role.replace(' ', '-')}-{pid}.trace.json"
    dump(path, [*titles(pid, role, rows), *events(slices, parts, base_ns, full=False)], {
        "format": FORMAT, "role": role, "pid": pid, "base_ns": base_ns, "node": origin.node, "rank": origin.rank,
        "clock": origin.clock, "clock_id": clock_id(), "credit_nbytes": origin.credit_nbytes, "full": origin.full,
        "parts": {number: part for number, part in parts.items() if number in used}})
    return path


def clock_id() -> str:
    """Return an id of this clock: the machine's boot and the time namespace, to which CLOCK_MONOTONIC belongs."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # kernels before 5.6 have no time namespaces
        return boot_id()


def read(path: Path) -> Process:
    """Return the process that wrote *path*.

    Raises `ConfigError` if the file cannot be read, is incomplete, or is not a bpsfast trace.
    """
    document = decode(path)
    try:
        process = msgspec.convert(document["otherData"], Process, strict=False)
        if process.format != FORMAT:
            raise ValueError(f"its format is {process.format!r}, expected {FORMAT!r}")
        process.spans = list(spans_of(document["traceEvents"], process.base_ns))
    except (KeyError, TypeError, ValueError) as exc:  # msgspec's errors are ValueErrors
        raise ConfigError(f"{path} is not the trace of a bpsfast process: {words(exc)}; only files that a job wrote to "
                          "its trace_dir belong there") from exc
    process.path = str(path)
    return process


def decode(path: Path) -> dict[str, Any]:
    """Return the JSON object in *path*, or raise `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{path} is no whole trace, but another file or an incomplete copy ({exc})") from exc


def spans_of(events: Iterable[dict[str, Any]], base_ns: int) -> Iterable[Span]:
    """Yield the spans in *events*, which `events` made."""
    begun: dict[str, dict[str, Any]] = {}
    for event in events:
        phase = event["ph"]
        if phase == "b":
            begun[event["id"]] = event
            continue
        if phase == "e":
            begin = begun.pop(event["id"])
            length = event["ts"] - begin["ts"]
        elif phase == "X":
            begin, length = event, event["dur"]
        else:
            continue
        args = begin["args"]
        for name in ("part", "round", *DETAILS.get(begin["cat"], ())):
            if not isinstance(args[name], int):
                raise TypeError(f"{name} of {begin['name']!r} is {args[name]!r}")
        begin_ns = base_ns + round(begin["ts"] * 1000)
        yield Span(begin_ns, begin_ns + round(length * 1000), begin["cat"], args)


def durations(folder: str | Path) -> dict[str, dict[str, float]]:
    """Return seconds spent per role and kind of span: {"node 0": {"sum": 0.8, "wire": 1.2}, ...}."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(Path(folder).glob(PATTERN)):
        process = read(path)
        spent = found.setdefault(process.role, {})
        for span in process.spans:
            spent[span.kind] = spent.get(span.kind, 0.0) + (span.end_ns - span.begin_ns) * 1e-9
    return found


def words(exc: Exception) -> str:
    """Return why the contents of a file raised *exc*."""
    return f"{exc.args[0]!r} is missing" if isinstance(exc, KeyError) else str(exc)
