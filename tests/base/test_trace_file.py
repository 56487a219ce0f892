"""Tests that a process's trace file reads back as written, and that any other file is refused by name."""
from __future__ import annotations

import json
import os

import pytest

from bpsfast import trace
from bpsfast.orchestration.clock_offset import Point
from bpsfast.orchestration.errors import ConfigError
from bpsfast.trace import Origin, Part
from tests.support import trace_format
from tests.support.trace_records import change, record, send


def test_what_is_written_is_read_again(tmp_path):
    records = (record("sum", 10**15 + 1, 10**15 + 777, part=3)
               + record("wire", 10**15 + 5, 10**15 + 900, part=3, thread=2))
    origin = Origin(node=4, clock=(Point(1, 2, 3),), peers={2: 0}, credit_nbytes=9, full=True)
    path = trace.write(tmp_path, "node 4", records, {3: Part("w", 1, 2, 0, 5), 8: Part("unused")}, origin,
                       [send(10**15, 10**15 + 5, 1, part=3)])
    assert path.name == f"node-4-{os.getpid()}.trace.json"
    found = trace.read(path)
    assert (found.role, found.node, found.rank, found.credit_nbytes, found.full) == ("node 4", 4, -1, 9, True)
    assert found.clock == ((1, 2, 3),) and found.clock_id and found.parts == {3: ("w", 1, 2, 0, 5)}
    assert [(span.kind, span.begin_ns - 10**15, span.end_ns - 10**15) for span in found.spans] == [
        ("credit", 0, 5), ("sum", 1, 777), ("wire", 5, 900)]
    assert found.spans[2].args["peer"] == 0
    trace_format.check(path)


def test_a_process_that_did_nothing_leaves_a_file_too(tmp_path):
    assert trace.read(trace.write(tmp_path, "rank 0", b"")).spans == []


@pytest.mark.parametrize(("content", "words"), [
    ("", "no whole trace"), ('{"otherData": {', "no whole trace"), ("[]", "no whole trace"),
    ("{}", "'otherData' is missing"), ('{"otherData": {"role": "x"}, "traceEvents": []}', "not the trace of a bpsfast"),
    (b"\xff\xfe", "no whole trace"),
])
def test_another_file_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "a.trace.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words) as caught:
        trace.read(path)
    assert str(path) in str(caught.value)


def test_every_cut_of_a_file_is_refused(tmp_path):
    path = trace.write(tmp_path, "node 0", record("wire", 1, 5) + record("sum", 2, 6))
    whole = path.read_bytes().rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            trace.read(path)


@pytest.mark.parametrize("damage", [
    {"format": "bpsfast process 0"}, {"node": "zero"}, {"clock": [[1, 2]]}, {"parts": {"x": []}},
])
def test_another_format_is_refused(tmp_path, damage):
    path = trace.write(tmp_path, "node 0", b"")
    change(path, **damage)
    with pytest.raises(ConfigError, match="not the trace of a bpsfast process"):
        trace.read(path)


@pytest.mark.parametrize("damage", [{"args": {}}, {"args": {"part": 0.5, "round": 1}}, {"dur": "long"}, {"ph": "e"}])
def test_an_event_that_is_none_of_ours_is_refused(tmp_path, damage):
    path = trace.write(tmp_path, "node 0", record("sum", 1, 5))
    document = json.loads(path.read_text())
    document["traceEvents"][-1].update(damage)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="not the trace of a bpsfast process"):
        trace.read(path)


def test_durations_add_up_per_role_and_kind(tmp_path):
    records = record("sum", 0, 2 * 10**9) + record("wire", 0, 5 * 10**8) + record("sum", 0, 10**9)
    trace.write(tmp_path, "node 0", records)
    assert trace.durations(tmp_path) == {"node 0": {"sum": 3.0, "wire": 0.5}}
