"""One process that a launcher has started: its command, its output by lines, its end."""
from __future__ import annotations

import enum
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

from .daemons import tethered

_TAIL_LINES = 200


class Kind(enum.Enum):
    """What a process is for: the job is over when the ranks are; daemons then end by themselves."""

    RANK = "rank"
    DAEMON = "daemon"


class Command(msgspec.Struct, frozen=True):
    """One process to start: its `name` heads its lines; `environ` is its whole environment.

    `via` is a command that runs another in some place and becomes it, such as ``ip netns exec NAME``.
    """

    name: str
    kind: Kind
    argv: Sequence[str]
    environ: Mapping[str, str]
    via: Sequence[str] = ()


class Child:
    """One running process, its two pipes, and the last lines it wrote to standard error."""

    def __init__(self, command: Command, colour: int, tee: Path | None) -> None:
        self.command = command
        self.colour = colour
        self.code: int | None = None  # as of Popen.returncode
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self.tee: BinaryIO | None = None if tee is None else (tee / f"{command.name.replace(' ', '-')}.log").open("wb")
        self.process = subprocess.Popen(
            [*command.via, *tethered(command.argv)], env=dict(command.environ), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0,
        )
        self.pidfd = os.pidfd_open(self.process.pid)

    def signal_group(self, number: int) -> None:
        """Send *number* to the process and everything it started that did not leave its group."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return  # all of them have ended

    def exit_code(self) -> int:
        """Return the code of the ended process as `Popen.returncode` would, and leave it a zombie.

        Until `close` its number, and so its group's, cannot become another process's.
        """
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert info is not None, "the pidfd is readable only after the end"
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def close(self) -> None:
        """End what is left of the group, reap, give back descriptors."""
        self.signal_group(signal.SIGKILL)
        self.process.wait(timeout=10.0)
        os.close(self.pidfd)
        for file in (self.process.stdout, self.process.stderr, self.tee):
            if file is not None:
                file.close()


class Pipe:
    """One output stream of one child, cut into lines."""

    def __init__(self, child: Child, source: IO[bytes], target: BinaryIO, keeps_tail: bool) -> None:
        self.child = child
        self.source = source
        self.target = target
        self.rest = b""
        self._keeps_tail = keeps_tail
        os.set_blocking(source.fileno(), False)

    def take(self) -> list[bytes] | None:
        """Return the lines completed by one read; None at the end of the stream.

        Raises
        ------
        BlockingIOError
            If there is nothing to read now.
        """
        data = os.read(self.source.fileno(), 65536)
        if not data:
            return None
        # a progress bar rewrites its line by \r: each state becomes a line
        lines = (self.rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self.rest = lines.pop()
        return lines

    def show(self, lines: Sequence[bytes]) -> None:
        """Write *lines* to the target, headed by the child's name, and to its log; keep them if they are errors."""
        head = f"[{self.child.command.name}]"
        if self.target.isatty():
            head = f"\x1b[{self.child.colour}m{head}\x1b[0m"
        for line in lines:
            if self._keeps_tail:
                self.child.tail.append(line)
            if self.child.tee is not None:
                self.child.tee.write(line + b"\n")
            self.target.write(head.encode() + b" " + line + b"\n")
        if lines:
            self.target.flush()
