"""Outcomes and what to type with them."""
from __future__ import annotations

import pytest

from bpsfast.tools.doctor import finding
from bpsfast.tools.doctor.finding import Action, Status


@pytest.mark.parametrize(("make", "status"), [
    (finding.info, Status.INFO), (finding.warned, Status.WARN), (finding.failed, Status.FAIL)])
def test_an_outcome_keeps_its_commands_in_order_and_drops_empty_ones(make, status: Status) -> None:
    found = make("words", host="type this", docker="", check="look here")
    assert found.status is status and found.found == "words"
    assert found.actions == (Action("host", "type this"), Action("check", "look here"))


def test_what_is_well_or_was_not_done_has_nothing_to_type() -> None:
    assert finding.passed("x").status is Status.PASS and finding.passed("x").actions == ()
    assert finding.skipped("x").status is Status.SKIP and finding.skipped("x").actions == ()
    assert finding.advice(host="a", k8s="") == (Action("host", "a"),)
