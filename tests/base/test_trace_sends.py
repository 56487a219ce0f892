"""Tests that the log of sends has the rounds that settings ask for, up to its capacity."""
from __future__ import annotations

from bpsfast.orchestration.priority.send_queue import WriteOrder
from bpsfast.trace import Limits, SendLog


def test_a_send_becomes_a_span_with_its_pass_and_order():
    log, order = SendLog(Limits(10)), WriteOrder().enter(part=5, rank=6, is_result=True, first_waiting=None).order
    log.add(100, 250, 3, 5, 1, 4096, order)
    (span,) = log.spans({3: 2})
    assert (span.begin_ns, span.end_ns, span.kind) == (100, 250, "credit")
    assert span.args == {"part": 5, "round": 1, "nbytes": 4096, "peer": 2, "pass": 1, "order": 13}


def test_only_the_rounds_that_are_asked_for_and_only_what_fits():
    log = SendLog(Limits(3, 4, 6))
    for round_ in range(1, 10):
        log.add(0, 1, 0, 0, round_, 1, 0)
    assert [span.args["round"] for span in log.spans({})] == [4, 5, 6] and log.full
    log.add(0, 1, 0, 0, 5, 1, 0)
    assert len(list(log.spans({}))) == 3
