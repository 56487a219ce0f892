"""Checks traces against Chrome's published Trace Event Format, and rejects everything that viewers would ignore."""
from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

_REQUIRED = {
    "M": {"name", "ph", "pid", "tid", "args"}, "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"},
    "b": {"name", "cat", "ph", "pid", "tid", "ts", "id", "args"}, "e": {"name", "cat", "ph", "pid", "tid", "ts", "id"},
    "s": {"name", "cat", "ph", "pid", "tid", "ts", "id"}, "f": {"name", "cat", "ph", "pid", "tid", "ts", "id", "bp"},
    "i": {"name", "cat", "ph", "pid", "tid", "ts", "s", "args"},
}
_TITLES = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}


def check(path: Path) -> list[dict[str, Any]]:
    """Return the events of the trace at *path*; raises AssertionError if it is invalid."""

    def no_constant(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    document = json.loads(path.read_text(), parse_constant=no_constant)
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    for event in events:
        assert _REQUIRED[event["ph"]] == set(event), event
        assert isinstance(event["name"], str) and type(event["pid"]) is type(event["tid"]) is int, event
        if event["ph"] == "M":
            assert _TITLES[event["name"]] in event["args"], event
        else:
            assert isinstance(event["ts"], int | float) and math.isfinite(event["ts"]) and event["ts"] >= 0, event
            assert isinstance(event["cat"], str) and isinstance(event.get("args", {}), dict), event
    timed = [event for event in events if event["ph"] != "M"]
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in timed} <= named, "a process without a name"
    _rows(timed)
    _pairs(timed)
    _flows(timed)
    return events


def in_order(events: list[dict[str, Any]]) -> bool:
    """Return whether times never decrease."""
    times = [event["ts"] for event in events if event["ph"] != "M"]
    return times == sorted(times)


def _rows(events: list[dict[str, Any]]) -> None:
    """Check that slices of one row have gaps between them, so that no rounding makes them overlap."""
    ends: dict[tuple[int, int], float] = defaultdict(lambda: -1.0)
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        row = event["pid"], event["tid"]
        assert event["dur"] > 0.0015 and event["ts"] > ends[row] + 0.0015, (event, ends[row])
        ends[row] = event["ts"] + event["dur"]


def _pairs(events: list[dict[str, Any]]) -> None:
    """Check that each beginning has exactly one end, which is not earlier."""
    open_: dict[tuple[int, str, str], dict[str, Any]] = {}
    seen = set()
    for event in events:
        key = event["pid"], event["cat"], event.get("id", "")
        if event["ph"] == "b":
            assert key not in seen, f"{key} begins twice"
            seen.add(key)
            open_[key] = event
        elif event["ph"] == "e":
            begin = open_.pop(key)
            assert begin["name"] == event["name"] and begin["ts"] < event["ts"], event
    assert not open_, f"without an end: {open_}"


def _flows(events: list[dict[str, Any]]) -> None:
    """Check that each arrow has one beginning and one later end, both inside a slice of their row."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    ends: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            ends[event["id"]].append(event)
    for both in ends.values():
        assert [event["ph"] for event in both] == ["s", "f"] and both[1]["bp"] == "e", both
        assert both[0]["ts"] <= both[1]["ts"] and (both[0]["name"], both[0]["cat"]) == (both[1]["name"], both[1]["cat"])
        for event in both:
            around = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] < end for begin, end in around), f"bound to nothing: {event}"
