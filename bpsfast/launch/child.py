"""Processes of a job that this process has started itself: commands, output, ends."""
from __future__ import annotations

import enum
import fcntl
import functools
import os
import selectors
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Protocol

import msgspec

from .daemons import describe_exit, tethered
from .output import Sink


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
    """One process of a job, wherever it runs. `code` as of `Popen.returncode`, None until its end."""

    command: Command
    code: int | None

    def signal_group(self, number: int) -> None:
        """Send *number* to the process and everything it started that did not leave its group."""

    def end_in_words(self) -> str:
        """Return how it ended: "ended with exit code 3"."""


class Place(Protocol):
    """Where processes run. What happens there are events of the launcher's selector, whose data are functions: each
    handles its event and returns the processes whose end it has seen.
    """

    def open(self, selector: selectors.BaseSelector) -> None:
        """Have events from now on."""

    def start(self, command: Command, out: Sink, err: Sink) -> Process:
        """Start *command*; what it writes goes to *out* and *err*."""

    def tick(self, now_s: float) -> tuple[float, Sequence[Process]]:
        """Do what time asks for; return when to be called again (`time.monotonic`), and what has ended."""

    def drain(self) -> None:
        """All processes have ended: hand on what they have written and nobody has read."""

    def hang_up(self) -> None:
        """Begin to `close`, so that many places end at once."""

    def close(self) -> None:
        """End whatever is left, wait for it, give everything back. Idempotent."""


class Child:
    """One process of this machine, and its two pipes. Raises `OSError` if it cannot be started; then none is left."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.code: int | None = None
        self.process = subprocess.Popen(
            [*command.via, *tethered(command.argv)], env=dict(command.environ), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0,
        )
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
        except OSError:  # no descriptor is left
            self._end()
            raise

    def signal_group(self, number: int) -> None:
        """See `Process`."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return  # all of them have ended

    def end_in_words(self) -> str:
        """See `Process`."""
        return describe_exit(self.code or 0)

    def exit_code(self) -> int:
        """Return the code of the ended process as `Popen.returncode` would, and leave it a zombie.

        Until `close` its number, and so its group's, cannot become another process's.
        """
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert info is not None, "the pidfd is readable only after the end"
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def close(self) -> None:
        """End what is left of the group, reap, give back descriptors."""
        self._end()
        os.close(self.pidfd)

    def _end(self) -> None:
        self.signal_group(signal.SIGKILL)
        self.process.wait(timeout=10.0)
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


class Children:
    """The `Place` that is this machine. Main thread only: children die with the thread that started them (`tether`)."""

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector | None = None
        self._children: list[Child] = []
        self._pipes: dict[Child, deque[Pipe]] = {}

    def open(self, selector: selectors.BaseSelector) -> None:
        """See `Place`."""
        self._selector = selector

    def start(self, command: Command, out: Sink, err: Sink) -> Child:
        """See `Place`."""
        child = Child(command)
        self._children.append(child)
        assert child.process.stdout is not None and child.process.stderr is not None
        self._pipes[child] = deque([Pipe(child.process.stdout, out), Pipe(child.process.stderr, err)])
        for pipe in self._pipes[child]:
            self._listen(pipe.source, functools.partial(self._forward, child, pipe))
        self._listen(child.pidfd, functools.partial(self._reap, child))
        return child

    def tick(self, now_s: float) -> tuple[float, Sequence[Child]]:
        """See `Place`."""
        return float("inf"), ()

    def drain(self) -> None:
        """See `Place`; what *their* children write is not waited for."""
        for child in self._children:
            self.drain_one(child)

    def drain_one(self, child: Child) -> None:
        """Hand on what one ended child has written."""
        for pipe in list(self._pipes[child]):
            pipe.drain()
            if pipe.has_ended:
                self._forget(child, pipe)

    def hang_up(self) -> None:
        """See `Place`."""
        for child in self._children:
            child.signal_group(signal.SIGKILL)

    def close(self) -> None:
        """See `Place`."""
        for child in self._children:
            child.close()
        self._children.clear()

    def _listen(self, source: IO[bytes] | int, handler: Callable[[], Sequence[Child]]) -> None:
        assert self._selector is not None, "opened"
        self._selector.register(source, selectors.EVENT_READ, handler)

    def _forward(self, child: Child, pipe: Pipe) -> Sequence[Child]:
        if pipe in self._pipes[child]:  # else drained since the event came
            pipe.forward()
            if pipe.has_ended:
                self._forget(child, pipe)
        return ()

    def _forget(self, child: Child, pipe: Pipe) -> None:
        assert self._selector is not None, "opened"
        self._selector.unregister(pipe.source)
        self._pipes[child].remove(pipe)

    def _reap(self, child: Child) -> Sequence[Child]:
        assert self._selector is not None, "opened"
        self._selector.unregister(child.pidfd)
        child.code = child.exit_code()
        return (child,)


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
