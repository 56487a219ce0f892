"""Start and watch a job's processes: the interface for any host (`ProcessHost`), and this host (`LocalProcesses`)."""
from __future__ import annotations

import contextlib
import enum
import fcntl
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import msgspec

from ..base import process_identity
from ..base.end_reports import Reports
from ..base.resources import is_ready
from .daemons import clean_environment, describe_exit, tie_to_parent
from .output import Sink

#: How long to wait for a process after SIGKILL. One that lives longer is another user's, or waits in the kernel.
AFTER_SIGKILL_S = 5.0
#: How often a killed `orphan_reaper` is replaced.
_N_REAPERS = 10


class Kind(enum.Enum):
    """What a process is for. The job ends with its ranks; daemons then end by themselves."""

    RANK = "rank"
    DAEMON = "daemon"
    HELPER = "helper"  # a daemon that the job can lose once it has started


class Command(msgspec.Struct, frozen=True):
    """One process to start. `name` heads its lines; `environ` is its whole environment.

    `via` is a command that runs another one elsewhere and becomes it, such as ``ip netns exec NAME``. `n_restarts`: how
    often it is started again if a signal kills it. `node`: number of the node that the process is, or of the node of
    this rank; -1 for other processes, and if the node is not a process of the same launcher.
    """

    name: str
    kind: Kind
    argv: Sequence[str]
    environ: Mapping[str, str]
    via: Sequence[str] = ()
    n_restarts: int = 0
    node: int = -1


class Process:
    """One process of a job, on any host. `code` is as `Popen.returncode`, None until its end at `ended_s`
    (`time.monotonic`). `is_lost`: its host is lost, so its end is not known.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.code: int | None = None
        self.ended_s = 0.0
        self.is_lost = False

    def signal_all(self, number: int) -> None:
        """Send signal *number* to the process and all that it started, except what has left its session."""

    def signal(self, number: int) -> None:
        """Send signal *number* to the process alone."""

    def end_in_words(self) -> str:
        """Return how it ended: "ended with exit code 3"."""
        return describe_exit(self.code or 0)


class EndReport(NamedTuple):
    """A report of *process* about its end (see `end_reports`); `time_s` is `time.monotonic` here."""

    process: Process
    word: str
    time_s: float


class ProcessHost(Protocol):
    """Where processes run. Its events go to the launcher's selector; their data are functions that handle the event
    and return the processes that have ended.

    `lost`: why the host is lost, "" if it is not. `is_silent`: whether it may be lost, as it sends less than it should.
    """

    lost: str = ""

    @property
    def is_silent(self) -> bool:
        """See the class."""
        return False

    def open(self, selector: selectors.BaseSelector) -> None:
        """Register events with *selector* from now on."""

    def start(self, command: Command, out: Sink, err: Sink) -> Process:
        """Start *command*; its output goes to *out* and *err*. The host must not be `lost`."""

    def tick(self, now_s: float) -> tuple[float, Sequence[Process]]:
        """Do what is due; return when to call again (`time.monotonic`), and the processes that have ended."""
        return float("inf"), ()

    def drain(self) -> None:
        """Pass on the output that is still in pipes; all processes have ended."""

    def reports(self) -> Sequence[EndReport]:
        """Return what processes have reported about their ends since the last call."""

    def begin_close(self) -> None:
        """Begin to `close`, so that many hosts end at once."""

    def close(self) -> None:
        """Kill all that is left, wait for that, and release everything. Idempotent."""


class LocalProcess(Process):
    """One process on this machine, and its two pipes. Raises `OSError` if it cannot be started."""

    def __init__(self, command: Command) -> None:
        super().__init__(command)
        self.is_released = False
        self.process = subprocess.Popen(
            [*command.via, *tie_to_parent(command.argv)], env=dict(command.environ), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0)
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
        except OSError:  # no descriptor is left
            self.signal_all(signal.SIGKILL)
            self.process.wait()  # only `die_with_parent` can have begun
            self._close_pipes()
            raise

    def signal_all(self, number: int) -> None:
        """See `Process`. Processes that now belong to another user are skipped."""
        if self.is_released:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
        for pid in _others_in_session(self.process.pid):  # listed after that: a process may leave the group meanwhile
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def signal(self, number: int) -> None:
        """See `Process`."""
        if self.is_released:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, number)

    def exit_code(self) -> int:
        """Return the code of the ended process, as `Popen.returncode`. It is a zombie until `release` or `close`.

        So its pid, which is its session's number, cannot become another process's.
        """
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:  # a debugger is told first, and may be slow to ask
            return os.waitstatus_to_exitcode(int(process_identity.stat(self.process.pid)[49]))
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def release(self) -> None:
        """Reap the ended process and close its descriptors, if its session is empty; nothing is signalled any more."""
        if not self.is_released and not _in_session(self.process.pid):
            self.close(time.monotonic())

    def close(self, until_s: float) -> None:
        """Kill what is left of the session, reap it, close descriptors. Gives up what still runs at *until_s*."""
        if self.is_released:
            return
        self.signal_all(signal.SIGKILL)
        self.is_released = True
        if is_ready(self.pidfd, until_s - time.monotonic()):
            self.process.poll()
        if self.process.returncode is None:
            self.process.returncode = -signal.SIGKILL  # else `subprocess` warns, and waits for it later
        self._close_pipes()
        os.close(self.pidfd)

    def _close_pipes(self) -> None:
        for file in (self.process.stdout, self.process.stderr):
            if file is not None:
                file.close()


class Pipe:
    """One output stream of one process, and its sink."""

    def __init__(self, source: IO[bytes], sink: Sink) -> None:
        self.source = source
        self._sink = sink
        self.has_ended = False
        os.set_blocking(source.fileno(), False)

    def forward(self) -> int:
        """Read once and pass the data on; return its size, 0 if there is none now."""
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
        """Pass on all that is in the pipe now, an incomplete line too, but not what grandchildren still write."""
        left_nbytes = fcntl.fcntl(self.source, fcntl.F_GETPIPE_SZ)
        while left_nbytes > 0 and (nbytes := self.forward()):
            left_nbytes -= nbytes
        self._sink.finish()


class LocalProcesses(ProcessHost):
    """This machine as a `ProcessHost`. Main thread only: processes die with the thread that started them
    (`die_with_parent`).

    An `orphan_reaper`, which runs from `open` until `close`, ends what they start if this process dies.
    """

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector | None = None
        self._children: list[LocalProcess] = []
        self._pipes: dict[LocalProcess, deque[Pipe]] = {}
        self._reports: Reports | None = None
        self._reaper: _ReaperProcess | None = None
        self._n_reapers = 0

    def open(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._reports = Reports()
        self._start_reaper()

    def _start_reaper(self) -> None:
        self._n_reapers += 1
        self._reaper = _ReaperProcess([child for child in self._children if not child.is_released])
        self._listen(self._reaper.pidfd, self._replace_reaper)

    def _replace_reaper(self) -> Sequence[LocalProcess]:
        """Start another reaper if one was killed, unless that happens again and again."""
        assert self._selector is not None and self._reaper is not None, "opened"
        self._selector.unregister(self._reaper.pidfd)
        self._reaper.close("end")
        self._reaper = None
        if self._n_reapers < _N_REAPERS:
            with contextlib.suppress(OSError):  # too many processes: do without
                self._start_reaper()
        return ()

    def start(self, command: Command, out: Sink, err: Sink) -> LocalProcess:
        assert self._reports is not None, "opened"
        for ended in self._children:  # an elastic job may lose many
            if ended.code is not None and not self._pipes[ended]:
                ended.release()
        reports = self._reports.environ(len(self._children))
        child = LocalProcess(msgspec.structs.replace(command, environ={**command.environ, **reports}))
        child.command = command
        self._children.append(child)
        if self._reaper is not None:
            self._reaper.tell_of(child)
        assert child.process.stdout is not None and child.process.stderr is not None
        self._pipes[child] = deque([Pipe(child.process.stdout, out), Pipe(child.process.stderr, err)])
        for pipe in self._pipes[child]:
            self._listen(pipe.source, functools.partial(self._forward, child, pipe))
        self._listen(child.pidfd, functools.partial(self._reap, child))
        return child

    def drain(self) -> None:
        """See `ProcessHost`; grandchildren may go on writing."""
        for child in self._children:
            self.drain_one(child)

    def drain_one(self, child: LocalProcess) -> None:
        """Pass on the output of an ended process."""
        for pipe in list(self._pipes[child]):
            pipe.drain()
            if pipe.has_ended:
                self._forget(child, pipe)

    def reports(self) -> Sequence[EndReport]:
        assert self._reports is not None, "opened"
        return [EndReport(self._children[number], word, time_s) for number, word, time_s in self._reports.read()
                if number < len(self._children)]

    def begin_close(self) -> None:
        for child in self._children:
            child.signal_all(signal.SIGKILL)

    def close(self) -> None:
        until_s = time.monotonic() + AFTER_SIGKILL_S
        is_well = all(child.code == 0 for child in self._children if child.command.kind is Kind.RANK)
        for child in self._children:
            child.close(until_s)
        self._children.clear()
        if self._reaper is not None:
            self._reaper.close("end" if is_well else "all")
            self._reaper = None
        if self._reports is not None:
            self._reports.close()
            self._reports = None

    def _listen(self, source: IO[bytes] | int, handler: Callable[[], Sequence[LocalProcess]]) -> None:
        assert self._selector is not None, "opened"
        self._selector.register(source, selectors.EVENT_READ, handler)

    def _forward(self, child: LocalProcess, pipe: Pipe) -> Sequence[LocalProcess]:
        if pipe in self._pipes[child]:  # else it was drained after the event
            pipe.forward()
            if pipe.has_ended:
                self._forget(child, pipe)
        return ()

    def _forget(self, child: LocalProcess, pipe: Pipe) -> None:
        assert self._selector is not None, "opened"
        self._selector.unregister(pipe.source)
        self._pipes[child].remove(pipe)
        pipe.source.close()

    def _reap(self, child: LocalProcess) -> Sequence[LocalProcess]:
        assert self._selector is not None, "opened"
        self._selector.unregister(child.pidfd)
        child.code, child.ended_s = child.exit_code(), time.monotonic()
        return (child,)


class _ReaperProcess:
    """An `orphan_reaper` for the sessions of *children*."""

    def __init__(self, children: Sequence[LocalProcess]) -> None:
        program = str(Path(__file__).with_name("orphan_reaper.py"))
        environ = {name: value for name, value in clean_environment(os.environ).items()
                   if name != process_identity.LAUNCHER_VARIABLE}
        source, self._target = os.pipe()
        os.set_blocking(self._target, False)  # a stopped reaper must not stop this process
        me = os.pidfd_open(os.getpid())
        try:
            for child in children:  # before it runs, as this process may be killed any time after
                self.tell_of(child)
            # in a session of its own, without the launcher's mark: what kills the job must not kill it
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", program, process_identity.mark(), str(me)], env=environ, pass_fds=[me],
                cwd="/", stdin=source, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            os.close(self._target)
            raise
        finally:
            os.close(source)
            os.close(me)

    def tell_of(self, child: LocalProcess) -> None:
        """Add the session of *child*."""
        self._say(f"{child.process.pid} {process_identity.start_time(child.process.pid)}")

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it was killed and will be replaced, or is stopped
            os.write(self._target, f"{line}\n".encode())

    def close(self, word: str) -> None:
        """Send the last *word* (see `orphan_reaper`) and wait for its end."""
        self._say(word)
        os.close(self._target)
        try:
            self._process.wait(AFTER_SIGKILL_S)
        except subprocess.TimeoutExpired:  # it is stopped
            self._process.kill()
            self._process.wait()
        os.close(self.pidfd)


def _others_in_session(session: int) -> list[int]:
    """Return the processes of *session* that have left its leader's group, as ``timeout`` does."""
    return [pid for pid, group in _in_session(session).items() if group != session]


def _in_session(session: int) -> dict[int, int]:
    """Return the living processes of *session*, and their groups."""
    return {int(name): int(fields[2]) for name in os.listdir("/proc")
            if name.isdecimal() and (fields := process_identity.stat(int(name))) and fields[0] not in "ZX"
            and fields[3] == str(session)}


class SignalEvents:
    """While entered, SIGINT, SIGTERM and SIGHUP are events of a selector: `fileno` is readable. Main thread only.

    SIGHUP stays ignored if it was (nohup).
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self) -> SignalEvents:
        # not a `WakeUp`: the interpreter writes each signal's number, from the C handler
        self._source, self._target = socket.socketpair()
        self._source.setblocking(False)
        self._target.setblocking(False)
        caught = [n for n in self._NUMBERS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, lambda number, frame: None) for number in caught}
        self._fd_before = signal.set_wakeup_fd(self._target.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._source.close()
        self._target.close()

    def fileno(self) -> int:
        """Return the descriptor to watch."""
        return self._source.fileno()

    def take(self) -> list[int]:
        """Return the numbers of the signals that have come."""
        return [number for number in self._source.recv(64) if number in self._NUMBERS]


def set_watched(selector: selectors.BaseSelector, source: Any, event: int, handler: Callable[[], Any],
                wanted: bool) -> None:
    """Register or unregister *handler* for *event* of *source*, as *wanted*."""
    watched = source in selector.get_map()
    if wanted and not watched:
        selector.register(source, event, handler)
    elif watched and not wanted:
        selector.unregister(source)


def thread_defaults(n_ranks: int) -> dict[str, str]:
    """Return the variables by which *n_ranks* ranks share this machine's cores."""
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, cores // n_ranks)), "PYTHONUNBUFFERED": "1"}
