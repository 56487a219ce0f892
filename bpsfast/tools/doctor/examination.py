"""Runs all checks. A check that raises is itself a finding: the others still run, and the reader learns what broke."""
from __future__ import annotations

import traceback
from collections.abc import Sequence

from .checks import CHECKS
from .facts import Facts
from .finding import Check, Finding, Outcome, Status, advice

_ORDER = (Status.FAIL, Status.WARN, Status.INFO, Status.PASS, Status.SKIP)


def examine(facts: Facts, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Return what every check found, the worst first, else in the order of their numbers. Never raises."""
    findings = [Finding(check, _run(check, facts)) for check in checks]
    return sorted(findings, key=lambda finding: (_ORDER.index(finding.status), finding.check.code))


def blocking(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that keep RDMA from working."""
    return [each for each in findings if each.status is Status.FAIL]


def exit_code(facts: Facts, findings: Sequence[Finding]) -> int:
    """Return 1 if a check failed, 3 if no RDMA device could ever be used, else 0 (the codes of every command)."""
    if blocking(findings):
        return 1
    return 0 if facts.capable else 3


def _run(check: Check, facts: Facts) -> Outcome:
    try:
        return check.run(facts)
    except Exception as exc:  # a machine that nobody foresaw must not hide what the other checks found
        place = traceback.extract_tb(exc.__traceback__)[-1]
        return Outcome(Status.WARN, f"the check itself broke: {type(exc).__name__}: {exc} "
                                    f"({place.filename.rsplit('/', 1)[-1]}:{place.lineno})",
                       advice(check="please report this with the output of `bpsfast doctor --json`"))
