"""Processes of a job that this process has started itself: commands, output, ends."""
from __future__ import annotations

import contextlib
import enum
import fcntl
import functools
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import msgspec

from ..base import process_mark
from ..base.end_reports import Reports
from . import die_with_parent
from .daemons import clean_environment, describe_exit, tie_to_parent
from .output import Sink

#: How long what was sent SIGKILL may take to end; then it is given up: it is another user's, or waits in the kernel.
AFTER_SIGKILL_S = 5.0
#: How often a guardian that was killed is replaced.
_N_GUARDIANS = 10


class Kind(enum.Enum):
    """What a process is for: the job is over when the ranks are; daemons then end by themselves."""

    RANK = "rank"
    DAEMON = "daemon"
    HELPER = "helper"  # a daemon that the job can do without, once it has begun


class Command(msgspec.Struct, frozen=True):
    """One process to start: its `name` heads its lines; `environ` is its whole environment.

    `via` is a command that runs another in some place and becomes it, such as ``ip netns exec NAME``. `n_restarts`: how
    often it is started again if a signal has ended it.
    """

    name: str
    kind: Kind
    argv: Sequence[str]
    environ: Mapping[str, str]
    via: Sequence[str] = ()
    n_restarts: int = 0


class Process(Protocol):
    """One process of a job, wherever it runs. `code` as of `Popen.returncode`, None until its end at `ended_s`
    (`time.monotonic`). `is_lost`: its host is, so that nothing is known of its end.
    """

    command: Command
    code: int | None
    ended_s: float
    is_lost: bool

    def signal_all(self, number: int) -> None:
        """Send *number* to the process and everything it started that did not leave its session."""

    def end_in_words(self) -> str:
        """Return how it ended: "ended with exit code 3"."""


class EndReport(NamedTuple):
    """What a process has reported of its end, when (`time.monotonic` here): see `end_reports`."""

    process: Process
    word: str
    time_s: float


class ProcessHost(Protocol):
    """Where processes run. What happens there are events of the launcher's selector, whose data are functions: each
    handles its event and returns the processes whose end it has seen.

    `lost`: why nothing more can be started or heard there, "" if it can. `is_silent`: whether less is heard of it than
    there should be, so that it may be lost.
    """

    @property
    def lost(self) -> str:
        """See the class."""

    @property
    def is_silent(self) -> bool:
        """See the class."""

    def open(self, selector: selectors.BaseSelector) -> None:
        """Have events from now on."""

    def start(self, command: Command, out: Sink, err: Sink) -> Process:
        """Start *command*; what it writes goes to *out* and *err*. Not in a place that is `lost`."""

    def tick(self, now_s: float) -> tuple[float, Sequence[Process]]:
        """Do what time asks for; return when to be called again (`time.monotonic`), and what has ended."""

    def drain(self) -> None:
        """All processes have ended: hand on what they have written and nobody has read."""

    def reports(self) -> Sequence[EndReport]:
        """Return what processes have reported of their ends since the last call."""

    def begin_close(self) -> None:
        """Begin to `close`, so that many places end at once."""

    def close(self) -> None:
        """End whatever is left, wait for it a while, give everything back. Idempotent."""


class LocalProcess:
    """One process of this machine, and its two pipes. Raises `OSError` if it cannot be started; then none is left."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.code: int | None = None
        self.ended_s = 0.0
        self.is_lost = False
        self.process = subprocess.Popen(
            [*command.via, *tie_to_parent(command.argv)], env=dict(command.environ), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0,
        )
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
        except OSError:  # no descriptor is left
            self.signal_all(signal.SIGKILL)
            self.process.wait()  # nothing but `tether` can have begun
            self._close_pipes()
            raise

    def signal_all(self, number: int) -> None:
        """See `Process`. What cannot be signalled, as it is another user's by now, is left out."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
        for pid in _others_in_session(self.process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def end_in_words(self) -> str:
        """See `Process`."""
        return describe_exit(self.code or 0)

    def exit_code(self) -> int:
        """Return the code of the ended process as `Popen.returncode` would, and leave it a zombie.

        Until `close` its number, and so its session's, cannot become another process's.
        """
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:  # a debugger is attached: it is told first, and may not ask for long
            return os.waitstatus_to_exitcode(int(process_mark.stat(self.process.pid)[49]))
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def close(self, until_s: float) -> None:
        """End what is left of the session, reap, give back descriptors. Who lives on after *until_s* is let go."""
        self.signal_all(signal.SIGKILL)
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if poll.poll(max(0.0, until_s - time.monotonic()) * 1e3):
            self.process.poll()
        if self.process.returncode is None:
            self.process.returncode = -signal.SIGKILL  # or `subprocess` would complain of it, and wait for it later
        self._close_pipes()
        os.close(self.pidfd)

    def _close_pipes(self) -> None:
        for file in (self.process.stdout, self.process.stderr):
            if file is not None:
                file.close()


class Pipe:
    """One output stream of one child, and where it goes."""

    def __init__(self, source: IO[bytes], sink: Sink) -> None:
        self.source = source
        self._sink = sink
        self.has_ended = False
        os.set_blocking(source.fileno(), False)

    def forward(self) -> int:
        """Hand on what one read gives; return how many bytes these were, 0 if another would give nothing now."""
        try:
            data = os.read(self.source.fileno(), 65536)
        except BlockingIOError:
            return 0
        if data:
            self._sink.feed(data)
        else:
            self._sink.finish()
            self.has_ended = True
        return len(data)

    def drain(self) -> None:
        """Hand on all that is in the pipe, a line without an end too; not what children of the child go on writing."""
        left_nbytes = fcntl.fcntl(self.source, fcntl.F_GETPIPE_SZ)
        while left_nbytes > 0 and (nbytes := self.forward()):
            left_nbytes -= nbytes
        self._sink.finish()


class LocalProcesses:
    """The `ProcessHost` that is this machine. Main thread only: children die with the thread that started them (`tether`).

    What they start themselves dies with this process by a `guardian`, which lives from `open` until `close`.
    """

    lost = ""
    is_silent = False

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector | None = None
        self._children: list[LocalProcess] = []
        self._pipes: dict[LocalProcess, deque[Pipe]] = {}
        self._reports: Reports | None = None
        self._guardian: _ReaperProcess | None = None
        self._n_guardians = 0

    def open(self, selector: selectors.BaseSelector) -> None:
        """See `ProcessHost`."""
        self._selector = selector
        self._reports = Reports()
        self._guard()

    def _guard(self) -> None:
        self._n_guardians += 1
        self._guardian = _ReaperProcess(self._children)
        self._listen(self._guardian.pidfd, self._replace_guardian)

    def _replace_guardian(self) -> Sequence[LocalProcess]:
        """Somebody has killed the guardian: have another one, unless there is a reason that goes on."""
        assert self._selector is not None and self._guardian is not None, "opened"
        self._selector.unregister(self._guardian.pidfd)
        self._guardian.close("end")
        self._guardian = None
        if self._n_guardians < _N_GUARDIANS:
            with contextlib.suppress(OSError):  # there may be too many processes: what runs is worth more
                self._guard()
        return ()

    def start(self, command: Command, out: Sink, err: Sink) -> LocalProcess:
        """See `ProcessHost`."""
        assert self._reports is not None, "opened"
        reports = self._reports.environ(len(self._children))
        child = LocalProcess(msgspec.structs.replace(command, environ={**command.environ, **reports}))
        child.command = command
        self._children.append(child)
        if self._guardian is not None:
            self._guardian.tell_of(child)
        assert child.process.stdout is not None and child.process.stderr is not None
        self._pipes[child] = deque([Pipe(child.process.stdout, out), Pipe(child.process.stderr, err)])
        for pipe in self._pipes[child]:
            self._listen(pipe.source, functools.partial(self._forward, child, pipe))
        self._listen(child.pidfd, functools.partial(self._reap, child))
        return child

    def tick(self, now_s: float) -> tuple[float, Sequence[LocalProcess]]:
        """See `ProcessHost`."""
        return float("inf"), ()

    def drain(self) -> None:
        """See `ProcessHost`; what *their* children write is not waited for."""
        for child in self._children:
            self.drain_one(child)

    def drain_one(self, child: LocalProcess) -> None:
        """Hand on what one ended child has written."""
        for pipe in list(self._pipes[child]):
            pipe.drain()
            if pipe.has_ended:
                self._forget(child, pipe)

    def reports(self) -> Sequence[EndReport]:
        """See `ProcessHost`."""
        assert self._reports is not None, "opened"
        return [EndReport(self._children[number], word, time_s) for number, word, time_s in self._reports.read()
                if number < len(self._children)]

    def begin_close(self) -> None:
        """See `ProcessHost`."""
        for child in self._children:
            child.signal_all(signal.SIGKILL)

    def close(self) -> None:
        """See `ProcessHost`."""
        until_s = time.monotonic() + AFTER_SIGKILL_S
        is_well = all(child.code == 0 for child in self._children if child.command.kind is Kind.RANK)
        for child in self._children:
            child.close(until_s)
        self._children.clear()
        if self._guardian is not None:
            self._guardian.close("end" if is_well else "all")
            self._guardian = None
        if self._reports is not None:
            self._reports.close()
            self._reports = None

    def _listen(self, source: IO[bytes] | int, handler: Callable[[], Sequence[LocalProcess]]) -> None:
        assert self._selector is not None, "opened"
        self._selector.register(source, selectors.EVENT_READ, handler)

    def _forward(self, child: LocalProcess, pipe: Pipe) -> Sequence[LocalProcess]:
        if pipe in self._pipes[child]:  # else drained since the event came
            pipe.forward()
            if pipe.has_ended:
                self._forget(child, pipe)
        return ()

    def _forget(self, child: LocalProcess, pipe: Pipe) -> None:
        assert self._selector is not None, "opened"
        self._selector.unregister(pipe.source)
        self._pipes[child].remove(pipe)

    def _reap(self, child: LocalProcess) -> Sequence[LocalProcess]:
        assert self._selector is not None, "opened"
        self._selector.unregister(child.pidfd)
        child.code, child.ended_s = child.exit_code(), time.monotonic()
        return (child,)


class _ReaperProcess:
    """A process that ends the sessions of *children*, and what has left them, should this process die: see `guardian`.
    """

    def __init__(self, children: Sequence[LocalProcess]) -> None:
        program = str(Path(__file__).with_name("orphan_reaper.py"))
        environ = {name: value for name, value in clean_environment(os.environ).items() if name != die_with_parent.VARIABLE}
        source, self._target = os.pipe()
        os.set_blocking(self._target, False)  # should it be stopped, it shall stop nobody else
        me = os.pidfd_open(os.getpid())
        try:
            for child in children:  # before it runs, as we may be killed any time after
                self.tell_of(child)
            # a session of its own, and the mark of no launcher: whoever kills us and ours shall not kill it
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", program, process_mark.mark(), str(me)], env=environ, pass_fds=[me], cwd="/",
                stdin=source, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            os.close(self._target)
            raise
        finally:
            os.close(source)
            os.close(me)

    def tell_of(self, child: LocalProcess) -> None:
        """Let it guard the session of *child*."""
        self._say(f"{child.process.pid} {process_mark.start_time(child.process.pid)}")

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it was killed, and is replaced; or stopped
            os.write(self._target, f"{line}\n".encode())

    def close(self, word: str) -> None:
        """Say the last *word*, see `guardian`, and wait for its end."""
        self._say(word)
        os.close(self._target)
        try:
            self._process.wait(AFTER_SIGKILL_S)
        except subprocess.TimeoutExpired:  # it is stopped
            self._process.kill()
            self._process.wait()
        os.close(self.pidfd)


def _others_in_session(session: int) -> list[int]:
    """Return the processes of *session* that have left the group of its leader, as ``timeout`` does."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := process_mark.stat(int(name))) and fields[0] not in "ZX":
            if fields[3] == str(session) != fields[2]:
                found.append(int(name))
    return found


def watch(selector: selectors.BaseSelector, source: Any, event: int, handler: Callable[[], Any], wanted: bool) -> None:
    """Have *handler* called for an *event* of *source*, or no longer."""
    watched = source in selector.get_map()
    if wanted and not watched:
        selector.register(source, event, handler)
    elif watched and not wanted:
        selector.unregister(source)


def thread_defaults(n_ranks: int) -> dict[str, str]:
    """Return the variables that *n_ranks* ranks need to share this machine's cores."""
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, cores // n_ranks)), "PYTHONUNBUFFERED": "1"}
