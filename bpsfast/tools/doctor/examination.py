"""Runs all checks of ``bpsfast doctor`` and formats their report."""
from __future__ import annotations

import textwrap
import traceback
from collections.abc import Sequence
from typing import Any

import click

from ..._version import __version__
from . import addressing, driver, fabric, hardware, memory, transports
from .facts import Facts
from .finding import Check, Finding, Outcome, Status, advice, skipped

CHECKS: tuple[Check, ...] = tuple(sorted(
    (check for module in (addressing, driver, fabric, hardware, memory, transports) for check in module.CHECKS),
    key=lambda check: check.code))

_ORDER = (Status.FAIL, Status.WARN, Status.INFO, Status.PASS, Status.SKIP)


def examine(facts: Facts, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run *checks*; return their findings, worst first, then by number. Never raises: a failed check is a finding."""
    findings = [Finding(check, _run(check, facts)) for check in checks]
    return sorted(findings, key=lambda finding: (_ORDER.index(finding.status), finding.check.code))


def blocking(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that prevent RDMA."""
    return [each for each in findings if each.status is Status.FAIL]


def exit_code(facts: Facts, findings: Sequence[Finding]) -> int:
    """Return the exit code: 1 if a check failed, 3 if no RDMA device can ever be used, else 0."""
    if blocking(findings):
        return 1
    return 0 if facts.capable else 3


def lacking(check: Check, facts: Facts) -> Outcome | None:
    """Return the outcome of a check that lacks what it needs, None if it can run."""
    if check.needs and not facts.host.devices:
        return skipped("no RDMA device")
    return skipped("no port can be used") if check.needs == "port" and not facts.choice.rails else None


def _run(check: Check, facts: Facts) -> Outcome:
    try:
        return lacking(check, facts) or check.run(facts)
    except Exception as exc:  # an unforeseen machine must not hide the findings of the other checks
        place = traceback.extract_tb(exc.__traceback__)[-1]
        return Outcome(Status.WARN, f"the check itself failed: {type(exc).__name__}: {exc} "
                                    f"({place.filename.rsplit('/', 1)[-1]}:{place.lineno})",
                       advice(check="please report this with the output of `bpsfast doctor --json`"))

_COLOURS = {Status.PASS: "green", Status.FAIL: "red", Status.WARN: "yellow", Status.INFO: "cyan", Status.SKIP: None}
_TITLE_WIDTH = 20


def text(facts: Facts, findings: Sequence[Finding], width: int | None = None) -> str:
    """Return the report as colored text; its lines are at most *width* wide, except commands to type."""
    lines = _wrapped("", head(facts), width)
    for finding in findings:
        status = click.style(finding.status.value, fg=_COLOURS[finding.status])
        first, *more = finding.outcome.found.split("\n")
        lines += _wrapped(f"  {status}  {finding.check.code}  {finding.check.title:<{_TITLE_WIDTH}}  ", first, width)
        lines += [part for line in more for part in _wrapped(" " * (_TITLE_WIDTH + 16), line, width)]
    lines += _wrapped("", verdict(facts, findings), width)
    for finding in findings:
        if finding.outcome.actions and finding.status is not Status.PASS:
            why = f": {finding.check.why}" if finding.status in (Status.FAIL, Status.WARN) else ""
            lines += ["", *_wrapped("", f"[{finding.check.code}] {finding.check.title}{why}", width)]
            lines += [f"  {action.where + ':':<8} {action.command}" for action in finding.outcome.actions]
            lines.append(f"  {'more:':<8} bpsfast explain {finding.check.code}")
    return "\n".join(lines)


def _wrapped(start: str, words: str, width: int | None) -> list[str]:
    """Return *start* and *words* as lines of at most *width*, aligned below the first word."""
    indent = len(click.unstyle(start))
    if width is None or width < indent + 30:
        return [start + words]
    first, *more = textwrap.wrap(words, width - indent, break_on_hyphens=False, break_long_words=False) or [""]
    return [start + first, *(" " * indent + line for line in more)]


def head(facts: Facts) -> str:
    """Return the line that says which machine was examined."""
    place = f", in a {facts.container} container".replace("container container", "container") if facts.container else ""
    peer = f"   peer {facts.peer_name}" if facts.peer is not None else ""
    return (f"bpsfast doctor {__version__}   host {facts.hostname}   kernel {facts.kernel_release}   user {facts.user} "
            f"(uid {facts.uid}{place}){peer}")


def verdict(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return the summary and the transport that would be used now."""
    bad = [each for each in findings if each.status in (Status.FAIL, Status.WARN)]
    stops = blocking(findings)
    if not bad:
        words = "No problem found." if facts.capable else "No problem found, but there is no RDMA device."
    elif len(bad) == 1:
        words = f"1 problem, it {'blocks' if stops else 'does not block'} RDMA."
    else:
        words = f"{len(bad)} problems, {len(stops) or 'none'} of them block{'' if len(stops) > 1 else 's'} RDMA."
    return f"{words} Transport that would be used now: {transport(facts, findings)}"


def transport(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return the transport between machines that the findings allow."""
    streams = f"tcp ({facts.settings.tcp_streams} streams)"
    if facts.settings.transport in ("tcp", "shm"):
        return streams if facts.settings.transport == "tcp" else "shm (one machine only)"
    if facts.choice.rails and not blocking(findings):
        return "rdma (" + ", ".join(rail.name for rail in facts.choice.rails) + ")"
    return streams if facts.settings.transport == "auto" else "none: the setting transport=rdma cannot be met"


def data(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the report as JSON data."""
    return {
        "version": __version__, "host": facts.hostname, "kernel": facts.kernel_release, "user": facts.user,
        "uid": facts.uid, "container": facts.container or None, "peer": facts.peer_name or None,
        "transport": transport(facts, findings), "blocked": [each.check.code for each in blocking(findings)],
        "findings": [{
            "code": each.check.code, "title": each.check.title, "severity": each.check.severity.name.lower(),
            "status": each.status.value, "found": each.outcome.found,
            "why": each.check.why, "cause": each.check.cause,
            "actions": [{"where": action.where, "command": action.command} for action in each.outcome.actions],
        } for each in findings],
    }
