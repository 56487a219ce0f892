"""Arrows: from each input through the sums to each result, for every way that partitions travel."""
from __future__ import annotations

import json

import pytest

from bpsfast import trace
from bpsfast.trace import Origin, Part
from tests.support import perfetto, trace_format
from tests.support.trace_records import gather, job, record


def arrows(path) -> list[tuple[str, str]]:
    """The slices that arrows join, by role and kind, as the format binds them."""
    events = trace_format.check(path)
    roles = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    ends: dict[int, list[str]] = {}
    for event in events:
        if event["ph"] in "sf":
            (around,) = (each for each in events if each["ph"] == "X" and each["tid"] == event["tid"]
                         and each["pid"] == event["pid"] and each["ts"] <= event["ts"] < each["ts"] + each["dur"])
            ends.setdefault(event["id"], []).append(f"{roles[around['pid']]} {around['cat']}")
    return sorted((begin, end) for begin, end in ends.values())


EXPECTED = [("node 0 receive", "rank 0 deliver"), ("node 1 receive", "node 1 sum"), ("node 1 sum", "node 0 receive"),
            ("rank 0 copy", "node 1 receive"), ("rank 1 push", "node 1 sum")]


def test_a_gradient_is_followed_over_the_wire(tmp_path):
    job(tmp_path)
    trace.merge(tmp_path, tmp_path / "trace.json")
    assert arrows(tmp_path / "trace.json") == EXPECTED


def test_perfetto_shows_the_same_arrows(tmp_path):
    job(tmp_path)
    trace.merge(tmp_path, tmp_path / "trace.json")
    perfetto.check(tmp_path / "trace.json")
    (found,) = perfetto.query(tmp_path / "trace.json", """
        select p.name || ' ' || a.cat, q.name || ' ' || b.cat from flow
        join slice a on a.id = slice_out join thread_track t on t.id = a.track_id
        join thread u using (utid) join process p using (upid)
        join slice b on b.id = slice_in join thread_track v on v.id = b.track_id
        join thread w on w.utid = v.utid join process q on q.upid = w.upid""")
    assert sorted(map(tuple, found)) == EXPECTED


def test_partials_and_shared_memory(tmp_path):
    """Two ranks of node 0 make a partial, which node 1 reads where it lies."""
    parts = {0: Part("w", owner=1)}
    trace.write(tmp_path / "0", "node 0", record("sum", 5000, 6000), parts, Origin(node=0))
    trace.write(tmp_path / "1", "node 1", record("sum", 8000, 9000), parts, Origin(node=1))
    for rank in (0, 1):
        trace.write(tmp_path / f"r{rank}", f"rank {rank}",
                    record("push", 1000, 1100, nbytes=1) + record("wait", 1200, 9100), parts, Origin(node=0, rank=rank))
    gather(tmp_path)
    trace.merge(tmp_path, tmp_path / "trace.json")
    assert arrows(tmp_path / "trace.json") == [
        ("node 0 sum", "node 1 sum"), ("node 1 sum", "rank 0 wait"), ("node 1 sum", "rank 1 wait"),
        ("rank 0 push", "node 0 sum"), ("rank 1 push", "node 0 sum")]


@pytest.mark.parametrize("lost", ["node-0", "node-1", "rank-0"])
def test_a_process_without_a_file_only_leaves_out_its_arrows(tmp_path, lost):
    job(tmp_path)
    next(tmp_path.glob(f"{lost}-*")).unlink()
    trace.merge(tmp_path, tmp_path / "trace.json")
    found = arrows(tmp_path / "trace.json")
    role = lost.replace("-", " ")
    assert set(found) >= {pair for pair in EXPECTED if not any(role in end for end in pair)}
    assert not any(role in end for pair in found for end in pair)


def test_an_arrow_back_in_time_is_left_out_and_counted(tmp_path):
    parts = {0: Part("w", owner=0)}
    trace.write(tmp_path / "0", "node 0", record("sum", 1000, 2000), parts, Origin(node=0))
    trace.write(tmp_path / "1", "rank 0", record("push", 5000, 6000, nbytes=1), parts, Origin(node=0, rank=0))
    gather(tmp_path)
    trace.merge(tmp_path, tmp_path / "trace.json")
    assert arrows(tmp_path / "trace.json") == []
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["arrows_left_out"] == 1
