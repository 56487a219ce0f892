"""A check of ``bpsfast doctor`` and its outcome: a verdict, an explanation and the commands to type."""
from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .facts import Facts


class Severity(enum.Enum):
    """Severity of a check that fails."""

    BLOCKS = "E"
    SLOW = "W"
    INFORMS = "I"


class Status(enum.Enum):
    """The verdict of a check.

    FAIL: RDMA cannot work. WARN: it is slow or fragile. INFO: good to know. SKIP: the check does not apply, or
    something that it needs is missing.
    """

    PASS = "PASS"
    FAIL = "FAIL"
    WARN = "WARN"
    INFO = "INFO"
    SKIP = "SKIP"


@dataclass(frozen=True)
class Action:
    """A command to type, and where: "host", "docker", "k8s", "switch", "job" (settings), "check" (verify)..."""

    where: str
    command: str


@dataclass(frozen=True)
class Outcome:
    """The result of a check: the verdict, what was found, and the actions that fix it."""

    status: Status
    found: str
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True)
class Check:
    """One check: number, name, what `bpsfast explain` prints about it, and the function that runs it.

    `symptoms` are texts that users paste; `cause` is the cause behind them; `why` is the effect if nothing is done;
    `seen` names public reports; `advice` has commands for any machine, with names in capitals to fill in (the actions
    of an outcome are for this machine). Without what it `needs`, an RDMA "device" or a usable "port", it is skipped.
    """

    code: str
    title: str
    severity: Severity
    symptoms: tuple[str, ...]
    cause: str
    why: str
    seen: str
    run: Callable[[Facts], Outcome]
    advice: tuple[Action, ...] = ()
    needs: Literal["", "device", "port"] = ""


@dataclass(frozen=True)
class Finding:
    """A check and its outcome."""

    check: Check
    outcome: Outcome

    @property
    def status(self) -> Status:
        """The verdict."""
        return self.outcome.status


def advice(**commands: str) -> tuple[Action, ...]:
    """Return actions from commands by where to type them."""
    return tuple(Action(where, command) for where, command in commands.items() if command)


def _outcome(status: Status) -> Callable[..., Outcome]:
    return lambda found, **actions: Outcome(status, found, advice(**actions))


#: Functions that return the outcome of a check from what was found (or why it cannot run) and, by where to type them,
#: commands: it passed, was skipped, informs (`info`), found something slow or fragile, or something that prevents RDMA.
passed, skipped, info, warned, failed = map(
    _outcome, (Status.PASS, Status.SKIP, Status.INFO, Status.WARN, Status.FAIL))
