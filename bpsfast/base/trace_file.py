"""The file that each process of a job leaves in ``trace_dir``: its spans, and what `merge` has to know of it."""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..orchestration.clock_offset import Point
from ..orchestration.errors import ConfigError
from . import trace_chrome
from .process_identity import boot_id
from .trace_records import DETAILS, Part, Span, spans

FORMAT = "bpsfast process 1"
PATTERN = "*.trace.json"


class Origin(NamedTuple):
    """Where records come from.

    `node`: index of the process's node; `rank`: -1 for the node itself. Of nodes: `clock`, what is known of the
    scheduler's clock; `peers`, the node behind each source id; `credit_nbytes` that may be under way to one of them.
    `full`: there may have been more records than were kept.
    """

    node: int = -1
    rank: int = -1
    clock: tuple[Point, ...] = ()
    peers: Mapping[int, int] = {}
    credit_nbytes: int = 0
    full: bool = False


_NOWHERE = Origin()


class Process(msgspec.Struct, kw_only=True):
    """One process of a job, as its file tells. `clock_id` is the same where CLOCK_MONOTONIC is."""

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
    """Write what this process did as ``<folder>/<role>-<pid>.trace.json`` and return that path.

    Parameters
    ----------
    role
        What the process is, as it should be titled: "node 0", "rank 3".
    records
        Concatenated native records, as `Engine.trace`, `Stream.trace` and `Port.trace` return them.
    parts
        What the partitions are called; those that are not here are called by number.
    sends
        What `SendLog.spans` gives.
    """
    folder, parts, pid = Path(folder), parts or {}, os.getpid()
    found = [*spans(records, origin.peers), *sends]
    base_ns = min((span.begin_ns for span in found), default=0)
    slices, rows = trace_chrome.place(found, pid)
    used = {number for span in found for number in span.covered}
    path = folder / f"{role.replace(' ', '-')}-{pid}.trace.json"
    trace_chrome.dump(path, [*trace_chrome.titles(pid, role, rows), *trace_chrome.events(slices, parts, base_ns, full=False)], {
        "format": FORMAT, "role": role, "pid": pid, "base_ns": base_ns, "node": origin.node, "rank": origin.rank,
        "clock": origin.clock, "clock_id": clock_id(), "credit_nbytes": origin.credit_nbytes, "full": origin.full,
        "parts": {number: part for number, part in parts.items() if number in used}})
    return path


def clock_id() -> str:
    """Return what tells clocks apart: the machine's boot, and the namespace that its CLOCK_MONOTONIC belongs to."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # kernels before 5.6 have one for all
        return boot_id()


def read(path: Path) -> Process:
    """Return the process that wrote *path*.

    Raises
    ------
    ConfigError
        If the file cannot be read, is cut off, or is none of ours.
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
        raise ConfigError(f"{path} is no whole trace ({exc}): it is another file, or was cut off while it was copied"
                          ) from exc


def spans_of(events: Iterable[dict[str, Any]], base_ns: int) -> Iterable[Span]:
    """Yield the spans in *events*, which `chrome.events` made."""
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
    """Return seconds spent per role and kind of work: {"node 0": {"sum": 0.8, "wire": 1.2}, ...}."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(Path(folder).glob(PATTERN)):
        process = read(path)
        spent = found.setdefault(process.role, {})
        for span in process.spans:
            spent[span.kind] = spent.get(span.kind, 0.0) + (span.end_ns - span.begin_ns) * 1e-9
    return found


def words(exc: Exception) -> str:
    """Return what is wrong with a file whose contents raised *exc*."""
    return f"{exc.args[0]!r} is missing" if isinstance(exc, KeyError) else str(exc)
