"""What ``bpsfast run`` and the process that acts for it on another host tell each other (`line.Line`, `remote`).

That process, the *agent*, speaks first (`Here`). Then the launcher asks, and gets one answer each, until the hosts are
known to be fit; then it sends `Start`s and hears what becomes of them. Closing its pipe ends everything over there.
"""
from __future__ import annotations

from typing import Union

import msgspec

#: Of the messages and their order; both sides have to have the same.
VERSION = 3


class Here(msgspec.Struct, tag=True, frozen=True):
    """Agent, once: who it is. `addresses`: its IPv4 addresses, the one that ssh came to first.

    `version` and `package` stay the first two fields in every version, so that any two can tell each other apart.
    """

    version: int
    package: str
    python: str = ""
    addresses: list[str] = []


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Launcher: work in this *directory* (absolute). Answered by `Ready` or `Refused`."""

    directory: str


class Listen(msgspec.Struct, tag=True, frozen=True):
    """Launcher: keep a port for the scheduler, and answer who connects to it. Answered by `Listening`."""

    is_loopback: bool


class Reach(msgspec.Struct, tag=True, frozen=True):
    """Launcher: say by which of these *addresses* the listener that knows *token* can be reached (`Reached`)."""

    addresses: list[str]
    port: int
    token: bytes


class StopListening(msgspec.Struct, tag=True, frozen=True):
    """Launcher: the port is only kept from now on, for whatever is started next (`Ready`)."""


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Launcher: keep a port that is free on all addresses, for what is started here to listen on (`Reserved`)."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Launcher: start a process. *variables* are added to the environment that ssh gave the agent.

    *n_ranks* of the job run on this host: they share its cores. What becomes of process *number* is told by `Said` and
    `Ended`.
    """

    number: int
    name: str
    kind: str
    argv: list[str]
    variables: dict[str, str]
    n_ranks: int


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Launcher: send *signal* to the group of process *number*."""

    number: int
    signal: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Agent: done."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Agent: that cannot be done here, because of *reason*."""

    reason: str


class Listening(msgspec.Struct, tag=True, frozen=True):
    """Agent: on this port, where who connects is sent *token*."""

    port: int
    token: bytes


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """Agent: this *port* is kept."""

    port: int


class Reached(msgspec.Struct, tag=True, frozen=True):
    """Agent: for each address "" if it was reached, else why not."""

    errors: list[str]


class Said(msgspec.Struct, tag=True, frozen=True):
    """Agent: process *number* wrote *data* to its standard output (*is_error*: standard error)."""

    number: int
    is_error: bool
    data: bytes


class Ended(msgspec.Struct, tag=True, frozen=True):
    """Agent: process *number* ended; *code* as of `Popen.returncode`. What it wrote and reported was sent before."""

    number: int
    code: int


class Reported(msgspec.Struct, tag=True, frozen=True):
    """Agent: process *number* has reported *word* of its end, *age_s* seconds ago (`end_reports`)."""

    number: int
    word: str
    age_s: float


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Either: still here."""


FromAgent = Union[Here, Ready, Refused, Listening, Reserved, Reached, Said, Ended, Reported, Alive]  # noqa: UP007
FromLauncher = Union[Prepare, Listen, Reach, StopListening, Reserve, Start, Signal, Alive]  # noqa: UP007
