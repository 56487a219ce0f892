"""What a check is, and what it found: a verdict, words, and commands to type."""
from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from .facts import Facts


class Severity(enum.Enum):
    """How bad what the check looks for is at its worst."""

    BLOCKS = "E"
    SLOW = "W"
    INFORMS = "I"


class Status(enum.Enum):
    """The verdict. FAIL: RDMA cannot work so. WARN: it works, slowly or until something happens. INFO: good to know.

    SKIP: the check does not apply or needs something that is missing, which its words name.
    """

    PASS = "PASS"
    FAIL = "FAIL"
    WARN = "WARN"
    INFO = "INFO"
    SKIP = "SKIP"


@dataclass(frozen=True)
class Action:
    """What to type, and where: "host", "docker", "k8s", "switch", "job" (its settings), "check" (did it help?)..."""

    where: str
    command: str


@dataclass(frozen=True)
class Outcome:
    """What a check returns: the verdict, what it found in words, what to do if that is not good."""

    status: Status
    found: str
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True)
class Check:
    """One check: its number and name, what `explain` tells about it, and the function that does it.

    `symptoms` are the texts that users paste; `cause` is what is really wrong then; `why` is what happens if it stays
    so; `seen` are public threads where it was; `advice` is what to type on any machine, with names in capitals to fill
    in (an outcome's actions name this machine's own).
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


@dataclass(frozen=True)
class Finding:
    """A check and its outcome."""

    check: Check
    outcome: Outcome

    @property
    def status(self) -> Status:
        """The verdict."""
        return self.outcome.status


def passed(found: str) -> Outcome:
    """Return that all is well."""
    return Outcome(Status.PASS, found)


def skipped(reason: str) -> Outcome:
    """Return that the check could not be done, and why."""
    return Outcome(Status.SKIP, reason)


def told(found: str, **actions: str) -> Outcome:
    """Return something good to know; *actions* by where to type them."""
    return Outcome(Status.INFO, found, _actions(actions))


def warned(found: str, **actions: str) -> Outcome:
    """Return that something is slow or fragile."""
    return Outcome(Status.WARN, found, _actions(actions))


def failed(found: str, **actions: str) -> Outcome:
    """Return that RDMA cannot work so."""
    return Outcome(Status.FAIL, found, _actions(actions))


def advice(**commands: str) -> tuple[Action, ...]:
    """Return actions by where to type them."""
    return _actions(commands)


def _actions(commands: dict[str, str]) -> tuple[Action, ...]:
    return tuple(Action(where, command) for where, command in commands.items() if command)
