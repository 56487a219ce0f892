"""Tests how native records become spans, and that settings limit which rounds are recorded."""
from __future__ import annotations

import pytest

from bpsfast.base.settings import Settings
from bpsfast.base.trace_records import DETAILS, RECORD, Span, spans
from bpsfast.trace import KINDS, Limits, Part, limits
from tests.support.trace_records import record


def test_a_record_becomes_a_span():
    (found,) = spans(record("sum", 5_000, 9_000, part=3, round_=2, thread=1), {})
    assert found == Span(5_000, 9_000, "sum", {"part": 3, "round": 2, "nbytes": 4096, "thread": 1})
    assert found.key == (3, 2) and list(found.covered) == [3] and not found.overlaps


def test_the_source_of_a_connection_becomes_a_node():
    known, unknown = spans(record("wire", 1, 2, thread=4) + record("receive", 1, 2, thread=5), {4: 9})
    assert (known.args["peer"], unknown.args["peer"]) == (9, -1) and known.overlaps and not unknown.overlaps


def test_a_push_covers_partitions():
    (found,) = spans(record("push", 1, 2, part=7, nbytes=3), {})
    assert list(found.covered) == [7, 8, 9] and "nbytes" not in found.args


def test_half_a_record_and_one_that_ends_before_it_begins_are_left_out_and_unknown_kinds_are_kept():
    records = record("sum", 5, 4) + RECORD.pack(1, 2, 0, 1, 99, 0, 0) + b"half"
    assert [span.kind for span in spans(records, {})] == ["kind 99"]


@pytest.mark.parametrize(("name", "number"), [(name, number) for number, (name, _) in KINDS.items()])
def test_every_kind_has_what_readers_look_for(name, number):
    (found,) = spans(RECORD.pack(1, 2, 0, 1, number, 0, 0), {})
    assert found.kind == name and {"part", "round", *DETAILS.get(name, ())} <= set(found.args)


def test_what_is_kept_follows_the_settings():
    assert limits(Settings()) == Limits()
    asked = Settings(trace_dir="x", trace_capacity=9, trace_first_step=3, trace_last_step=4)
    assert limits(asked) == Limits(9, 3, 4)


def test_a_partition_of_a_whole_tensor_needs_no_number():
    assert (Part("weight").title, Part("weight", 1, 2).title) == ("weight", "weight[1]")


@pytest.mark.parametrize(("name", "title"), [
    ("a\nb", r"a\nb"), ("\x85\u2028", r"\x85\u2028"), ("größe.水", "größe.水")])
def test_titles_are_one_line_whatever_a_tensor_is_called(name, title):
    assert (Part(name).title, Part(name, 1, 2).title) == (title, f"{title}[1]")
