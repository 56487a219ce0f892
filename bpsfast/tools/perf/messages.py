"""What the two sides of a measurement tell each other over `control.Control`."""
from __future__ import annotations

from typing import Any, Union

import msgspec

from .perf_plan import Plan

#: Of the messages and their order; both sides have to have the same.
VERSION = 2


class Propose(msgspec.Struct, tag=True, frozen=True):
    """Client: what to measure. `place`: whose side this is, for people. `device`: the server's, "" as it likes."""

    plan: Plan
    place: dict[str, Any]
    device: str = ""


class Agree(msgspec.Struct, tag=True, frozen=True):
    """Server: it will be measured."""

    place: dict[str, Any]


class Offer(msgspec.Struct, tag=True, frozen=True):
    """How the sender of this can be reached by what is measured (`End.offer`)."""

    fields: dict[str, Any]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The sender of this has done what comes before *step*."""

    step: str


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Still measuring."""


class Sent(msgspec.Struct, tag=True, frozen=True):
    """The sender of this sent so much in a run by time, and sends no more."""

    n: int


class Done(msgspec.Struct, tag=True, frozen=True):
    """The sender's loop ended: what it sent and how long that took, and what its ports counted meanwhile."""

    sent: int
    seconds: float
    peak: float | None
    counters: list[dict[str, Any]]


class Result(msgspec.Struct, tag=True, frozen=True):
    """Client: one row, for the server to show as well."""

    row: dict[str, Any]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """The sender of this ends here: orderly (no *reason*), or because of one."""

    reason: str = ""


class Ask(msgspec.Struct, tag=True, frozen=True):
    """To a listener of ``bpsfast ping``: do *what* with these *fields*."""

    what: str
    fields: dict[str, Any]


class Answer(msgspec.Struct, tag=True, frozen=True):
    """To `Ask`."""

    fields: dict[str, Any]


Message = Union[Propose, Agree, Offer, Ready, Alive, Sent, Done, Result, Stop, Ask, Answer]  # noqa: UP007
