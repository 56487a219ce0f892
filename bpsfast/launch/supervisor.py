"""Run the processes of one job on this machine: their output, their end, and the one exit code.

What users of launchers ask for (and did not get): every line says whose it is; the traceback of the process that failed
*first* is printed last and alone; the exit code is that process's; Ctrl-C ends everything within two seconds; nothing
survives the launcher, not even its ``kill -9``.

One thread. Everything is an event of one selector: lines from pipes, ends of processes (pidfds), signals (a socket).
"""
from __future__ import annotations

import re
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from .. import logs
from .child import Child, Command, Kind, Pipe
from .daemons import describe_exit

_CHAINED = (b"another exception occurred:", b"direct cause of the following exception:")
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXIT_TIMEOUT = 124  # as of timeout(1)
#: What a process says that ended only because another one did: it is not the cause, whatever it says after that.
_CONSEQUENCE = re.compile(
    rb"(?:[\w.]+\.)?PeerLostError: |KeyboardInterrupt\b|bpsfast .*: (?:PeerLostError|" + logs.ABORTED.encode() + rb")")


class Limits(msgspec.Struct, frozen=True):
    """How long the supervisor waits, in seconds. `job_s` None: for ever (the job's own deadlines hold)."""

    job_s: float | None = None
    after_failure_s: float = 3.0
    after_ranks_s: float = 5.0
    after_sigterm_s: float = 1.5


class Supervisor:
    """Run *commands* until the job is over; `run` may be called once, from the main thread.

    Parameters
    ----------
    commands
        In the order of starting. At least one is of kind RANK.
    tee_dir
        Folder for one log file per process, or None.
    out, err
        Where lines go; their heads are coloured on a terminal.
    """

    def __init__(self, commands: Sequence[Command], *, limits: Limits | None = None, tee_dir: Path | None = None,
                 out: BinaryIO | None = None, err: BinaryIO | None = None) -> None:
        self._commands = commands
        self._limits = limits or Limits()
        self._tee_dir = tee_dir
        self._out = sys.stdout.buffer if out is None else out
        self._err = sys.stderr.buffer if err is None else err
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._failed: list[Child] = []  # in the order of their ends
        self._stopped: tuple[str, int] | None = None  # why the launcher itself ends the job, exit code
        self._deadline: float | None = None  # of the present phase
        self._phase = "run"

    def run(self) -> int:
        """Start everything, wait until everything has ended, return the job's exit code."""
        if self._tee_dir is not None:
            self._tee_dir.mkdir(parents=True, exist_ok=True)
        wake, waker = socket.socketpair()
        with wake, waker, self._selector:
            wake.setblocking(False)
            waker.setblocking(False)
            self._selector.register(wake, selectors.EVENT_READ, wake)
            # under nohup a hang-up stays ignored
            caught = [n for n in _ENDING if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
            before = {number: signal.signal(number, lambda number, frame: None) for number in caught}
            fd_before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            try:
                self._start()
                while any(child.code is None for child in self._children):
                    self._step()
                self._drain()
            finally:
                for child in self._children:
                    child.close()
                signal.set_wakeup_fd(fd_before)
                for number, handler in before.items():
                    signal.signal(number, handler)
        return self._verdict()

    def _start(self) -> None:
        if self._limits.job_s is not None:
            self._deadline = time.monotonic() + self._limits.job_s
        for index, command in enumerate(self._commands):
            child = Child(command, _COLOURS[index % len(_COLOURS)], self._tee_dir)
            self._children.append(child)
            assert child.process.stdout is not None and child.process.stderr is not None
            for pipe in (Pipe(child, child.process.stdout, self._out, keeps_tail=False),
                         Pipe(child, child.process.stderr, self._err, keeps_tail=True)):
                self._selector.register(pipe.source, selectors.EVENT_READ, pipe)
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _step(self) -> None:
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, Pipe):
                self._forward(key.data)
            elif isinstance(key.data, Child):
                self._reap(key.data)
            else:
                self._on_signals(key.data.recv(64))
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._next_phase()

    def _forward(self, pipe: Pipe) -> bool:
        """Print what one read of *pipe* gives; return whether another may give more now."""
        try:
            lines = pipe.take()
        except BlockingIOError:
            return False
        if lines is None:
            self._selector.unregister(pipe.source)
            pipe.show([pipe.rest] if pipe.rest else [])
            pipe.rest = b""
            return False
        pipe.show(lines)
        return True

    def _reap(self, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        child.code = child.exit_code()
        if child.code != 0 and self._phase in ("run", "failed", "leaving"):
            self._failed.append(child)
            if self._phase != "failed":
                self._enter("failed", self._limits.after_failure_s)
        elif self._phase == "run" and all(c.code == 0 for c in self._children if c.command.kind is Kind.RANK):
            self._enter("leaving", self._limits.after_ranks_s)

    def _enter(self, phase: str, duration_s: float) -> None:
        self._phase = phase
        self._deadline = time.monotonic() + duration_s

    def _next_phase(self) -> None:
        """The present phase's time is over."""
        running = [child for child in self._children if child.code is None]
        if self._phase == "run":
            self._stop(f"the job has not ended within {self._limits.job_s:g} s", _EXIT_TIMEOUT)
        elif self._phase in ("failed", "leaving"):
            if self._phase == "leaving" and running:
                names = ", ".join(child.command.name for child in running)
                self._say(f"still running {self._limits.after_ranks_s:g} s after the last rank ended: {names}; "
                          "ending them (did the program call bpsfast.init and shutdown?)")
            self._signal_all(signal.SIGTERM)
            self._enter("term", self._limits.after_sigterm_s)
        else:
            self._signal_all(signal.SIGKILL)
            self._enter("kill", 5.0)

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in _ENDING:
                continue
            if self._stopped is None:
                self._stop(f"got {signal.Signals(number).name}", 128 + number)
            else:  # asked twice: at once
                self._signal_all(signal.SIGKILL)
                self._enter("kill", 5.0)

    def _stop(self, why: str, code: int) -> None:
        self._stopped = (why, code)
        self._say(f"{why}: ending all processes")
        self._signal_all(signal.SIGTERM)
        self._enter("term", self._limits.after_sigterm_s)

    def _signal_all(self, number: int) -> None:
        for child in self._children:
            if child.code is None:
                child.signal_group(number)

    def _drain(self) -> None:
        """Print what the ended processes have left in their pipes; what *their* children write is not waited for."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Pipe):
                while self._forward(key.data):
                    continue
                if key.data.rest:
                    key.data.show([key.data.rest])

    def _verdict(self) -> int:
        cause = self._cause()
        code = 0
        if cause is not None and cause.code is not None:
            code = 128 - cause.code if cause.code < 0 else cause.code
            self._say(f"{cause.command.name} failed first: it {describe_exit(cause.code)}. Its last output:")
            for line in _traceback_of(cause.tail):
                self._err.write(line + b"\n")
            self._err.flush()
        return code if self._stopped is None else self._stopped[1]

    def _cause(self) -> Child | None:
        """Return the process whose failure explains the others': the first whose traceback blames nobody else.

        A daemon that exits in silence follows an abort; it is the cause only if nothing else is.
        """
        silent = None
        for child in self._failed:
            last = next((line for line in reversed(child.tail) if line.strip()), b"")
            if any(_CONSEQUENCE.match(line) for line in _traceback_of(child.tail)):
                continue
            if child.command.kind is Kind.RANK or last or (child.code or 0) < 0:
                return child
            silent = silent or child
        return silent or (self._failed[0] if self._failed else None)

    def _say(self, text: str) -> None:
        self._err.write(f"[bpsfast run] {text}\n".encode())
        self._err.flush()


def _traceback_of(tail: Sequence[bytes], n_lines: int = 20) -> list[bytes]:
    """Return the last traceback in *tail* (with the exceptions it came from), else its last lines."""
    lines = list(tail)
    starts = [i for i, line in enumerate(lines) if line.startswith(b"Traceback (most recent call last)")]
    if not starts:
        return lines[-n_lines:]
    first = starts[-1]
    for start in reversed(starts[:-1]):
        if not any(line.rstrip().endswith(_CHAINED) for line in lines[start:first]):
            break
        first = start
    return lines[first:]
