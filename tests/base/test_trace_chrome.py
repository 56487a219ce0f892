"""Tests how spans become events: rows without overlap, pairs for spans that may overlap, files written atomically."""
from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.base import trace_file
from bpsfast.base.trace_records import Part, Span


def span(begin_ns: int, end_ns: int, kind: str = "sum", **args: int) -> Span:
    return Span(begin_ns, end_ns, kind, {"part": 0, "round": 1, "nbytes": 1, **args})


def test_one_after_the_other_is_one_row_and_at_once_are_two():
    placed, rows = trace_file.place([span(0, 10), span(5, 20), span(20, 30), span(2, 4, thread=1)], 1)
    assert [(each.span.begin_ns, rows[each.tid]) for each in placed] == [
        (0, "sum 0"), (2, "sum 1"), (5, "sum 0 (2)"), (20, "sum 0")]


def test_what_may_overlap_has_no_row():
    placed, rows = trace_file.place([span(0, 10, "wire", peer=1)], 1)
    assert placed[0].tid == 0 and rows == {}
    begin, end = trace_file.events(placed, {0: Part("w", 2, 3)}, 0, full=False)
    assert (begin["ph"], begin["ts"], end["ph"], end["ts"]) == ("b", 0.0, "e", 0.01)
    assert begin["id"] == end["id"] and begin["name"] == end["name"] == "wire w[2]"


def test_an_event_says_what_is_known_of_the_partition():
    placed, _ = trace_file.place([span(3_000, 7_000)], 4)
    (event,) = trace_file.events(placed, {0: Part("w", 2, 3, 1, 8)}, 1_000, full=True)
    assert (event["ts"], event["dur"], event["pid"]) == (2.0, 4.0, 4)
    assert event["args"] == {"part": 0, "round": 1, "nbytes": 1, "tensor": "w", "partition": 2, "urgency": 8}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.sampled_from(["sum", "copy", "receive"])),
                max_size=40))
def test_nothing_overlaps_in_a_row_and_nothing_is_lost(times):
    spans = [span(begin_ns, begin_ns + length_ns, kind) for begin_ns, length_ns, kind in times]
    placed, rows = trace_file.place(spans, 1)
    assert sorted(each.span[:3] for each in placed) == sorted(each[:3] for each in spans)
    ends = dict.fromkeys(rows, -1)
    for each in placed:
        assert each.span.begin_ns > ends[each.tid]
        ends[each.tid] = each.span.end_ns
    for kind in ("sum", "copy", "receive"):  # and there are no more rows than were ever needed at once
        mine = [each for each in placed if each.span.kind == kind]
        most = max((sum(each.span.begin_ns <= moment < each.span.end_ns + 4 for each in mine) for moment in range(95)),
                   default=0)
        assert len({each.tid for each in mine}) <= most


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    def breaks():
        yield {"ph": "M"}
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        trace_file.dump(tmp_path / "x.json", breaks(), {})
    assert list(tmp_path.iterdir()) == []
    assert trace_file.dump(tmp_path / "x.json", iter([{"ph": "M"}, {"ph": "X"}]), {"a": 1}) == 2
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "otherData": {"a": 1}, "displayTimeUnit": "ms", "traceEvents": [{"ph": "M"}, {"ph": "X"}]}
