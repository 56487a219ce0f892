"""The doctor's words around its findings; the whole of them is in golden files."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import examination
from bpsfast.tools.doctor.finding import Check, Finding, Outcome, Severity, failed, info, passed, warned
from tests.sysfs_trees.machine import Machine


def _finding(outcome: Outcome, code: str = "X1") -> Finding:
    return Finding(Check(code, "a check", Severity.BLOCKS, ("s",), "cause", "It matters.", "seen", lambda _: outcome),
                   outcome)


@pytest.mark.parametrize(("outcomes", "words"), [
    ([passed("x")], "No problem found. Transport that would be used now: rdma (rxe0/1, rxe1/1)"),
    ([info("x")], "No problem found."),
    ([warned("x")], "1 problem, it does not block RDMA."),
    ([failed("x")], "1 problem, it blocks RDMA. Transport that would be used now: tcp (2 streams)"),
    ([failed("x"), warned("y")], "2 problems, 1 of them blocks RDMA."),
    ([failed("x"), failed("y")], "2 problems, 2 of them block RDMA."),
    ([warned("x"), warned("y")], "2 problems, none of them blocks RDMA."),
])
def test_the_verdict_counts_and_names_the_transport(outcomes: list[Outcome], words: str,
                                                    recorded_machine: Callable[[str], Machine]) -> None:
    assert examination.verdict(recorded_machine("rxe").facts(), list(map(_finding, outcomes))).startswith(words)


@pytest.mark.parametrize(("transport", "outcome", "words"), [
    ("auto", passed("x"), "rdma (rxe0/1, rxe1/1)"), ("rdma", passed("x"), "rdma (rxe0/1, rxe1/1)"),
    ("tcp", passed("x"), "tcp (2 streams)"), ("shm", passed("x"), "shm (one machine only)"),
    ("auto", failed("x"), "tcp (2 streams)"), ("rdma", failed("x"), "none: the setting transport=rdma"),
])
def test_the_transport_follows_the_setting_and_the_findings(transport: str, outcome: Outcome, words: str,
                                                            recorded_machine: Callable[[str], Machine]) -> None:
    facts = recorded_machine("rxe").facts(transport=transport)
    assert examination.transport(facts, [_finding(outcome)]).startswith(words)


def test_what_to_type_stands_below_with_the_reason(recorded_machine: Callable[[str], Machine]) -> None:
    facts = recorded_machine("rxe").facts()
    text = examination.text(facts, [_finding(failed("one\ntwo", host="type this"))])
    assert "[X1] a check: It matters.\n  host:    type this\n  more:    bpsfast explain X1" in text
    lines = text.splitlines()
    assert lines[1].index("one") - lines[1].index("  \x1b") > 0 and lines[2].strip() == "two"


def test_a_check_that_passed_has_nothing_to_type(recorded_machine: Callable[[str], Machine]) -> None:
    assert "[X1]" not in examination.text(recorded_machine("rxe").facts(), [_finding(passed("x"))])


@pytest.mark.parametrize(("path", "words"), [
    (".dockerenv", "in a docker container"), ("run/.containerenv", "in a podman container"),
    ("var/run/secrets/kubernetes.io/token", "in a kubernetes container")])
def test_the_head_names_the_container(path: str, words: str, recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("rxe")
    assert "container" not in examination.head(machine.facts())
    assert words in examination.head(machine.write(path, "").facts())
