"""Traces: native records become Chrome events, processes merge on one clock."""
from __future__ import annotations

import json
import os
import struct

from bpsfast import trace


def record(begin_ns: int, end_ns: int, part: int = 0, round_: int = 1, kind: int = 3, thread: int = 0) -> bytes:
    return struct.pack("<QQIIHHI", begin_ns, end_ns, part, round_, kind, thread, 4096)


def read(path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


def test_work_of_one_thread_is_a_complete_event(tmp_path):
    path = trace.write(tmp_path, "node 0", record(5_000, 9_000, part=3, kind=3, thread=2), {3: "weight[1]"})
    assert path.name == f"node-0-{os.getpid()}.trace.json"
    title, event = read(path)
    assert (title["name"], title["args"]) == ("process_name", {"name": "node 0"})
    assert event["name"] == "sum weight[1]"
    assert (event["ph"], event["ts"], event["dur"], event["tid"]) == ("X", 5.0, 4.0, 2)
    assert event["args"] == {"part": 3, "round": 1, "nbytes": 4096}


def test_work_that_overlaps_is_a_pair_of_asynchronous_events(tmp_path):
    records = record(1_000, 4_000, part=0, kind=4) + record(2_000, 6_000, part=1, kind=4)
    events = [event for event in read(trace.write(tmp_path, "node 0", records)) if event["ph"] != "M"]
    assert [(event["ph"], event["ts"]) for event in events] == [("b", 1.0), ("e", 4.0), ("b", 2.0), ("e", 6.0)]
    assert events[0]["id"] == events[1]["id"] != events[2]["id"]
    assert events[0]["name"] == "wire part 0"


def test_half_a_record_and_unknown_kinds_do_no_harm(tmp_path):
    events = read(trace.write(tmp_path, "node 0", record(1, 2, kind=99) + b"half"))
    assert [event["name"] for event in events[1:]] == ["kind 99 part 0"]


def test_merge_keeps_processes_apart_and_starts_at_zero(tmp_path):
    trace.write(tmp_path / "parts", "node 0", record(10_000, 11_000, kind=4))
    trace.write(tmp_path / "parts", "rank 0", record(7_000, 8_000, kind=4))
    n_events = trace.merge(tmp_path / "parts", tmp_path / "out" / "trace.json")
    events = read(tmp_path / "out" / "trace.json")
    assert n_events == len(events) == 6
    assert {event["pid"] for event in events} == {1, 2}
    timed = [event for event in events if "ts" in event]
    assert min(event["ts"] for event in timed) == 0.0
    assert len({event["id"] for event in timed}) == 2
    assert os.listdir(tmp_path / "out") == ["trace.json"]


def test_merge_of_nothing_is_an_empty_trace(tmp_path):
    assert trace.merge(tmp_path, tmp_path / "trace.json") == 0
    assert read(tmp_path / "trace.json") == []


def test_durations_add_up_per_role_and_kind(tmp_path):
    trace.write(tmp_path, "node 0", record(0, 2_000_000_000) + record(0, 500_000_000, kind=4) + record(0, 10**9))
    assert trace.durations(tmp_path) == {"node 0": {"sum": 3.0, "wire": 0.5}}
