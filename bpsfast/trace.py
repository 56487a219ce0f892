"""Native trace records to Chrome's trace format: one file per process, all on one clock, merged by `merge`.

A record is 32 bytes, little endian: u64 begin_ns, u64 end_ns (CLOCK_MONOTONIC, so all processes of one machine
agree), u32 part, u32 round, u16 kind, u16 thread, u32 nbytes. Open the merged file in chrome://tracing or
https://ui.perfetto.dev.
"""
from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_RECORD = struct.Struct("<QQIIHHI")

#: Kind of record -> its name, and whether several may overlap on one thread.
KINDS: dict[int, tuple[str, bool]] = {
    1: ("copy", False),
    2: ("queue", True),
    3: ("sum", False),
    4: ("wire", True),
    5: ("wait", True),
    6: ("deliver", False),
    7: ("gather", True),
}


def write(folder: str | Path, role: str, records: bytes, names: Mapping[int, str] | None = None) -> Path:
    """Write *records* of this process as ``<folder>/<role>-<pid>.trace.json`` and return that path.

    Parameters
    ----------
    role
        What the process is, as it should be titled: "node 0", "rank 3".
    records
        Concatenated native records, as `Engine.trace`, `Stream.trace` and `Port.trace` return them.
    names
        Part -> what to call it; parts without a name are called by number.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    events = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": role}}]
    events += _events(records, pid, names or {})
    path = folder / f"{role.replace(' ', '-')}-{pid}.trace.json"
    _replace(path, {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"role": role}})
    return path


def merge(folder: str | Path, out_path: str | Path) -> int:
    """Join all process files of *folder* into one trace at *out_path* and return its number of events.

    Processes of different machines or containers may have the same process id: each file gets its own number.
    The first moment of the job is time 0.
    """
    merged: list[dict[str, Any]] = []
    for number, path in enumerate(sorted(Path(folder).glob("*.trace.json")), start=1):
        for event in json.loads(path.read_text())["traceEvents"]:
            event["pid"] = number
            if "id" in event:
                event["id"] = f"{number}.{event['id']}"  # asynchronous events are matched over all processes
            merged.append(event)
    start = min((event["ts"] for event in merged if "ts" in event), default=0.0)
    for event in merged:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 3)
    _replace(Path(out_path), {"traceEvents": merged, "displayTimeUnit": "ms"})
    return len(merged)


def durations(folder: str | Path) -> dict[str, dict[str, float]]:
    """Return seconds spent per role and kind of work: {"node 0": {"sum": 0.8, "wire": 1.2}, ...}."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(Path(folder).glob("*.trace.json")):
        data = json.loads(path.read_text())
        spent = found.setdefault(data["otherData"]["role"], {})
        opened: dict[str, float] = {}
        for event in data["traceEvents"]:
            seconds = 0.0
            if event["ph"] == "X":
                seconds = event["dur"] * 1e-6
            elif event["ph"] == "b":
                opened[event["id"]] = event["ts"]
            elif event["ph"] == "e":
                seconds = (event["ts"] - opened.pop(event["id"])) * 1e-6
            if seconds:
                spent[event["cat"]] = spent.get(event["cat"], 0.0) + seconds
    return found


def _events(records: bytes, pid: int, names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    whole = len(records) - len(records) % _RECORD.size
    for number, record in enumerate(_RECORD.iter_unpack(memoryview(records)[:whole])):
        begin_ns, end_ns, part, round_, kind, thread, nbytes = record
        label, overlaps = KINDS.get(kind, (f"kind {kind}", False))
        common = {
            "name": f"{label} {names.get(part, f'part {part}')}",
            "cat": label,
            "pid": pid,
            "tid": thread,
            "args": {"part": part, "round": round_, "nbytes": nbytes},
        }
        if overlaps:
            # Overlapping work on one thread is no nested call: asynchronous pairs, matched by id.
            yield {**common, "ph": "b", "id": f"{number}", "ts": begin_ns / 1000}
            yield {**common, "ph": "e", "id": f"{number}", "ts": end_ns / 1000}
        else:
            yield {**common, "ph": "X", "ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}


def _replace(path: Path, data: dict[str, Any]) -> None:
    """Write JSON beside *path* and move it there: a reader never sees half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    partial.write_text(json.dumps(data))
    partial.replace(path)
