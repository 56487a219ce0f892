"""All checks: they are twenty-one, they never raise, and the worst comes first."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.tools.doctor import examination
from bpsfast.tools.doctor.examination import CHECKS
from bpsfast.tools.doctor.facts import Facts
from bpsfast.tools.doctor.finding import Check, Outcome, Severity, Status, failed, info, passed, skipped, warned
from tests.sysfs_trees import NAMES
from tests.sysfs_trees.machine import Machine


def _check(code: str, run: Callable[[Facts], Outcome]) -> Check:
    return Check(code, "a check", Severity.SLOW, ("symptom",), "cause", "why", "seen", run)


def _raises(_: Facts) -> Outcome:
    raise ZeroDivisionError("by nothing")


def test_all_checks_have_numbers_in_a_row_and_all_their_words() -> None:
    assert [check.code for check in CHECKS] == [f"RD{number:02}" for number in range(1, 23)]
    for check in CHECKS:
        assert check.title and check.symptoms and check.cause.endswith(".") and check.why.endswith(".") and check.seen
        assert check.advice, f"{check.code} has nothing to type"
    assert len({check.title for check in CHECKS}) == len(CHECKS)


def test_a_check_that_raises_is_a_finding_and_the_others_still_run(recorded_machine: Callable[[str], Machine]) -> None:
    facts = recorded_machine("none").facts()
    findings = examination.examine(facts, [_check("X1", _raises), _check("X2", lambda _: passed("well"))])
    assert [(each.check.code, each.status) for each in findings] == [("X1", Status.WARN), ("X2", Status.PASS)]
    assert "ZeroDivisionError: by nothing (test_examination.py:" in findings[0].outcome.found
    assert "report" in findings[0].outcome.actions[0].command


def test_the_worst_comes_first_then_the_number(recorded_machine: Callable[[str], Machine]) -> None:
    outcomes = {"A": passed("x"), "B": skipped("x"), "C": info("x"), "D": failed("x"), "E": warned("x"),
                "F": failed("x")}
    checks = [_check(code, lambda _, outcome=outcome: outcome) for code, outcome in outcomes.items()]
    findings = examination.examine(recorded_machine("none").facts(), checks)
    assert "".join(each.check.code for each in findings) == "DFECAB"
    assert [each.check.code for each in examination.blocking(findings)] == ["D", "F"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gone", ["sys", "proc", "dev", "etc", "answers.json"])
def test_a_machine_with_parts_missing_breaks_no_check(name: str, gone: str,
                                                      recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine(name)
    if (machine.root / gone).exists():
        machine.remove(gone)
    for finding in examination.examine(machine.facts()):
        assert "itself failed" not in finding.outcome.found, finding.outcome.found


@pytest.mark.parametrize("name", NAMES)
def test_files_full_of_nonsense_break_no_check(name: str, recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine(name)
    for path in sorted((machine.root / "sys").rglob("*")) + sorted((machine.root / "proc").rglob("*")):
        if path.is_file() and not path.is_symlink():
            path.write_text("0xzz \xff: -- 99999999999999999999\n" if len(path.name) % 2 else "")
    broken = [each.outcome.found for each in examination.examine(machine.facts())
              if "itself failed" in each.outcome.found]
    assert not broken


def test_the_exit_code_is_by_the_worst(recorded_machine: Callable[[str], Machine]) -> None:
    with_device, without = recorded_machine("rxe").facts(), recorded_machine("none").facts()
    bad = examination.examine(with_device, [_check("X1", lambda _: failed("x"))])
    well = examination.examine(with_device, [_check("X1", lambda _: warned("x"))])
    assert examination.exit_code(with_device, bad) == 1 == examination.exit_code(without, bad)
    assert examination.exit_code(with_device, well) == 0 and examination.exit_code(without, well) == 3
