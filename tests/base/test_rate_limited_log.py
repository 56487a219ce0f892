"""Tests the rate limit of log lines that strangers can cause."""
from __future__ import annotations

import logging

from bpsfast.base.logs import RateLimitedLog


def test_one_line_a_second_and_how_many_there_were_besides(caplog):
    caplog.set_level(logging.INFO)
    now = [100.0]
    refusals = RateLimitedLog(logging.getLogger("bpsfast.test"), lambda: now[0])
    for number in range(5):
        refusals.note(logging.INFO, "refused %d", number)
    refusals.note(logging.WARNING, "refused %s", "somebody else")
    now[0] += 1.0
    refusals.note(logging.INFO, "refused %d", 5)
    now[0] += 1.0
    refusals.note(logging.INFO, "refused %d", 6)
    assert caplog.messages == ["refused 0", "refused somebody else",
                               "refused 5 (and 4 more since the last such line)", "refused 6"]
