"""Messages between ``bpsfast run`` and its agent on another host, over ssh's standard input and output.

The *agent* sends first (`Here`). Then the launcher asks, and gets one answer each, until all hosts are checked; then it
sends `Start`s and receives what becomes of the processes. Closing the pipe ends everything on the host.

Messages are frames as in `base.framing`. The agent starts with a mark that no text contains, so whatever a login script
prints before is recognized; `PipeConnection` keeps it as `noise`.
"""
from __future__ import annotations

import os
from typing import Any, Union

import msgspec

from ..base.framing import Frames

#: Version of the messages and their order; both sides need the same.
VERSION = 4


class Here(msgspec.Struct, tag=True, frozen=True):
    """Agent, once: its versions and its addresses, first the one that ssh uses.

    `version` and `package` stay the first two fields in all versions, so that any two versions recognize each other.
    """

    version: int
    package: str
    python: str = ""
    addresses: list[str] = []


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Launcher: work in this *directory* (absolute). Answered by `Ready` or `Refused`."""

    directory: str


class Listen(msgspec.Struct, tag=True, frozen=True):
    """Launcher: reserve a port for the scheduler, and answer connections to it. Answered by `Listening`."""

    is_loopback: bool


class Reach(msgspec.Struct, tag=True, frozen=True):
    """Launcher: try by which *addresses* the listener with *token* is reached. Answered by `Reached`."""

    addresses: list[str]
    port: int
    token: bytes


class StopListening(msgspec.Struct, tag=True, frozen=True):
    """Launcher: only keep the port from now on. Answered by `Ready`."""


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Launcher: reserve a port that is free on all addresses. Answered by `Reserved`."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Launcher: start process *number*. *variables* are added to the environment that ssh gave the agent.

    *n_ranks* ranks of the job share the host's cores. `Said`, `Reported` and `Ended` follow.
    """

    number: int
    name: str
    kind: str
    argv: list[str]
    variables: dict[str, str]
    n_ranks: int


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Launcher: send *signal* to the group of process *number*, or to it alone."""

    number: int
    signal: int
    is_for_group: bool = True


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Agent: done."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Agent: that is not possible here, because of *reason*."""

    reason: str


class Listening(msgspec.Struct, tag=True, frozen=True):
    """Agent: it listens on *port*, and sends *token* to each connection."""

    port: int
    token: bytes


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """Agent: *port* is reserved."""

    port: int


class Reached(msgspec.Struct, tag=True, frozen=True):
    """Agent: for each address "" if it was reached, else the error."""

    errors: list[str]


class Said(msgspec.Struct, tag=True, frozen=True):
    """Agent: process *number* wrote *data* to its standard output (*is_error*: standard error)."""

    number: int
    is_error: bool
    data: bytes


class Ended(msgspec.Struct, tag=True, frozen=True):
    """Agent: process *number* ended; *code* as `Popen.returncode`. Its output and reports were sent before."""

    number: int
    code: int


class Reported(msgspec.Struct, tag=True, frozen=True):
    """Agent: process *number* reported *word* about its end *age_s* seconds ago (`end_reports`)."""

    number: int
    word: str
    age_s: float


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Both: sent at intervals, to show that this side is alive."""


FromAgent = Union[Here, Ready, Refused, Listening, Reserved, Reached, Said, Ended, Reported, Alive]  # noqa: UP007
FromLauncher = Union[Prepare, Listen, Reach, StopListening, Reserve, Start, Signal, Alive]  # noqa: UP007


#: No prefix of it is also a suffix, so a search finds it whatever comes before.
MARK = b"\x00\xffbpsfast agent\xff\xfe"
_READ_NBYTES = 1 << 16
_NOISE_NBYTES = 1 << 16


class PipeConnection:
    """One end of the connection. It never blocks: what a pipe does not take now stays here until `flush`.

    *source* and *target* are descriptors to read and write, owned by the caller; made non-blocking. *messages* is the
    union of messages that are accepted. *after_mark*: whether the other side sends a mark first (`mark` sends one).
    """

    def __init__(self, source: int, target: int, messages: Any, after_mark: bool) -> None:
        self.source = source
        self.target = target
        self._noise = b""
        self._frames = Frames(msgspec.msgpack.Decoder(messages).decode, "a message of the other side",
                              "another version, or something else writes to this pipe")
        self._awaits_mark = after_mark
        self._before_mark = b""
        self._pending = bytearray()
        for fd in (source, target):
            os.set_blocking(fd, False)

    @property
    def noise(self) -> bytes:
        """What came before the mark, cut to its last part."""
        return self._noise + self._before_mark

    @property
    def pending_nbytes(self) -> int:
        """Bytes not yet taken by the pipe."""
        return len(self._pending)

    def mark(self) -> None:
        """Send the mark before the first message."""
        self._pending += MARK

    def send(self, message: Any) -> None:
        """Append *message*, and write what the pipe takes now; see `flush`."""
        self._pending += self._frames.pack(message)
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes now.

        Raises `BrokenPipeError` if the other side has closed the pipe.
        """
        while self._pending:
            try:
                n_written = os.write(self.target, self._pending[:_READ_NBYTES])
            except BlockingIOError:
                return
            del self._pending[:n_written]

    def receive(self) -> list[Any]:
        """Return the messages that one read completes.

        Raises `EOFError` if the other side has closed the connection. `ProtocolError` if the data is no message of this
        version.
        """
        try:
            data = os.read(self.source, _READ_NBYTES)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        self._frames.feed(self._after_mark(data) if self._awaits_mark else data)
        return list(iter(self._frames.next, None))

    def _after_mark(self, data: bytes) -> bytes:
        """Return what follows the mark in *data*; add what precedes it to the noise."""
        before, mark, after = (self._before_mark + data).partition(MARK)
        # a part of the mark at the end is not noise yet
        n_undecided = 0 if mark else min(len(before), len(MARK) - 1)
        self._noise = (self._noise + before[:len(before) - n_undecided])[-_NOISE_NBYTES:]
        self._before_mark = before[len(before) - n_undecided:]
        self._awaits_mark = not mark
        return after
