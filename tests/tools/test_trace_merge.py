"""One trace of all processes: valid whatever the records are, on one clock, with inversions marked."""
from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from bpsfast import trace
from bpsfast.base.trace_records import RECORD
from bpsfast.orchestration.clock_offset import Point
from bpsfast.orchestration.errors import ConfigError
from bpsfast.trace import Origin, Part
from tests.support import perfetto, trace_format
from tests.support.trace_records import change, gather, job, record, send


def test_processes_stay_apart_and_time_begins_at_zero(tmp_path):
    job(tmp_path / "parts")
    n_events = trace.merge(tmp_path / "parts", tmp_path / "out" / "trace.json")
    events = trace_format.check(tmp_path / "out" / "trace.json")
    assert n_events == len(events) and trace_format.in_order(events)
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "node 0", "node 1", "rank 0", "rank 1"]
    assert {event["pid"] for event in events} == {1, 2, 3, 4}
    assert min(event["ts"] for event in events if "ts" in event) == 0.0
    assert os.listdir(tmp_path / "out") == ["trace.json"]


def test_slices_say_tensor_partition_round_bytes_peer_and_urgency(tmp_path):
    job(tmp_path)
    trace.merge(tmp_path, tmp_path / "trace.json")
    (wire, _) = (event for event in trace_format.check(tmp_path / "trace.json")
                 if event["ph"] == "b" and event["cat"] == "wire")
    assert wire["name"] == "wire weight"
    assert wire["args"] == {"tensor": "weight", "partition": 0, "urgency": 0, "part": 0, "round": 1, "nbytes": 4096,
                            "peer": 1}


def test_machines_come_onto_the_schedulers_clock(tmp_path):
    parts = {0: Part("w", owner=1)}
    for node, offset_ns in ((0, 10**9), (1, -5 * 10**9)):
        trace.write(tmp_path / str(node), f"node {node}",
                    record("sum", 10**10 - offset_ns + 1000 * node, 10**10 - offset_ns + 1000 * node + 500), parts,
                    Origin(node=node, clock=(Point(10**10 - offset_ns, offset_ns, 250),)))
        change(next((tmp_path / str(node)).glob("*.json")), clock_id=f"machine {node}")
    gather(tmp_path)
    trace.merge(tmp_path, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert [event["ts"] for event in document["traceEvents"] if event["ph"] == "X"] == [0.0, 1.0]
    assert (document["otherData"]["clocks"], document["otherData"]["clock_uncertainty_us"]) == (2, 0.25)


def test_inversions_are_marked_where_they_happened(tmp_path):
    parts = {0: Part("first", urgency=0), 1: Part("last", 3, 5, urgency=4)}
    trace.write(tmp_path, "node 0", b"", parts, Origin(node=0, credit_nbytes=50),
                [send(1000, 9000, 0, part=0), send(1000, 3000, 6, part=2), send(1000, 4000, 8, part=1)])
    trace.merge(tmp_path, tmp_path / "trace.json")
    (mark,) = (event for event in trace_format.check(tmp_path / "trace.json") if event["ph"] == "i")
    assert mark["name"] == "priority inversion: first waits, last[3] leaves" and mark["ts"] == 3.0
    assert mark["args"] == {"urgent": "first", "by": "last[3]", "peer": 1, "ahead_nbytes": 200, "round": 1}
    perfetto.check(tmp_path / "trace.json")


def test_what_was_merged_is_loaded_again(tmp_path):
    job(tmp_path)
    trace.merge(tmp_path, tmp_path / "trace.json")
    again, first = trace.reload(tmp_path / "trace.json"), trace.load(tmp_path)
    assert [(p.role, p.node, p.rank, p.credit_nbytes) for p in again.processes] == [
        (p.role, p.node, p.rank, p.credit_nbytes) for p in first.processes]
    begin_ns = min(span.begin_ns for process in first.processes for span in process.spans)
    for one, other in zip(again.processes, first.processes):
        assert sorted((s.kind, s.key, s.begin_ns, s.end_ns) for s in one.spans) == sorted(
            (s.kind, s.key, s.begin_ns - begin_ns, s.end_ns - begin_ns) for s in other.spans)
    assert again.parts == first.parts


def test_traces_of_two_jobs_in_one_folder_are_refused(tmp_path):
    job(tmp_path)
    first = next(tmp_path.glob("rank-0-*.trace.json"))
    (tmp_path / "rank-0-1.trace.json").write_text(first.read_text())
    with pytest.raises(ConfigError, match=r"are both of rank 0: the folder has traces of two jobs"):
        trace.merge(tmp_path, tmp_path / "trace.json")


def test_nothing_to_merge_and_a_foreign_file_are_errors_that_name_the_place(tmp_path):
    with pytest.raises(ConfigError, match=r"no \*.trace.json in .*BPSFAST_TRACE_DIR"):
        trace.merge(tmp_path, tmp_path / "trace.json")
    (tmp_path / "x.trace.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"x.trace.json is not the trace of a bpsfast process"):
        trace.merge(tmp_path, tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
    with pytest.raises(ConfigError, match=r"x.trace.json is not a trace of bpsfast"):
        trace.reload(tmp_path / "x.trace.json")


_TIMES = st.integers(0, 400) | st.integers(0, 2**50)
_RECORDS = st.lists(st.tuples(_TIMES, _TIMES, st.integers(0, 3), st.integers(0, 2), st.integers(0, 11),
                              st.integers(0, 2), st.integers(0, 2**32 - 1)), max_size=25)
_SENDS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 5), st.integers(0, 3),
                            st.integers(0, 2), st.integers(1, 2)), max_size=12)
_POINTS = st.builds(Point, st.integers(0, 2**50), st.integers(-2**50, 2**50), st.integers(0, 2**30))
_CLOCKS = st.lists(_POINTS, max_size=3)
_PARTS = st.builds(Part, st.text(max_size=5), st.integers(0, 3), st.integers(1, 4), st.integers(-1, 2),
                   st.integers(-1, 9))
#: To shrink folders full of files takes minutes, and shows little.
_PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


@settings(deadline=None, max_examples=100, phases=_PHASES, suppress_health_check=[HealthCheck.too_slow])
@given(processes=st.lists(st.tuples(_RECORDS, _SENDS, _CLOCKS, st.integers(0, 2), st.integers(-1, 2)), min_size=1,
                          max_size=4, unique_by=lambda process: process[3:]),
       parts=st.dictionaries(st.integers(0, 3), _PARTS))
def test_any_soup_of_records_is_a_valid_trace(processes, parts):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (records, sends, clock, node, rank) in enumerate(processes):
            origin = Origin(node=node, rank=rank, clock=tuple(clock), peers={0: 0, 1: 1}, credit_nbytes=50)
            native = b"".join(RECORD.pack(*each) for each in records)
            path = trace.write(folder / str(number), f"process {number}", native, parts, origin, [
                send(begin_ns, begin_ns + length_ns, order, part, peer, pass_)
                for begin_ns, length_ns, order, part, peer, pass_ in sends])
            trace_format.check(path)
            change(path, clock_id=str(node))
        gather(folder)
        trace.merge(folder, folder / "trace.json")
        assert trace_format.in_order(trace_format.check(folder / "trace.json"))
        lines = trace.summarise(trace.load(folder)).lines()
        assert len(lines) == 5 and all(line and "\n" not in line for line in lines)
        trace.summarise(trace.reload(folder / "trace.json"))
