"""Pipes of children: what is handed on at a child's end.

`test_supervisor` and `test_remote_agent` have the processes.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time

import pytest

from bpsfast.launch.processes import Command, Kind, LocalProcess, LocalProcesses, Pipe


class Echo:
    """A sink that puts back whatever it is fed: as a child's child that writes as fast as anybody reads."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.nbytes = 0
        self.has_finished = False

    def feed(self, data: bytes) -> None:
        self.nbytes += len(data)
        os.write(self._target, data)

    def finish(self) -> None:
        self.has_finished = True


@pytest.mark.timeout(20)
def test_who_goes_on_writing_is_not_waited_for(no_leaks):
    source, target = os.pipe()
    sink = Echo(target)
    with open(source, "rb", buffering=0) as reader:
        pipe = Pipe(reader, sink)
        os.write(target, b"x" * 1000)
        pipe.drain()
        assert fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ) <= sink.nbytes, "all that the pipe may have held"
        assert sink.has_finished and not pipe.has_ended
    os.close(target)


def test_a_full_pipe_is_emptied(no_leaks):
    source, target = os.pipe()
    with open(source, "rb", buffering=0) as reader, open(os.devnull, "wb") as nowhere:
        sink = Echo(nowhere.fileno())
        pipe = Pipe(reader, sink)
        nbytes = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
        os.write(target, bytes(nbytes))
        pipe.drain()
        assert sink.nbytes == nbytes and sink.has_finished
    os.close(target)


def test_what_cannot_be_watched_does_not_run(monkeypatch, no_leaks):
    pids = []

    def refuse(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        LocalProcess(Command("rank 0", Kind.RANK, ("sleep", "600"), os.environ))
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], os.WNOHANG)  # it has been: it has ended and no zombie is left
    with pytest.raises(ProcessLookupError):
        os.killpg(pids[0], 0)


_TRACER = """
import ctypes, sys, time
PTRACE_SEIZE = 0x4206
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None) == 0, ctypes.get_errno()
print("attached", flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(30)
def test_a_debugger_that_asks_for_no_end_holds_up_nobody(no_leaks):
    """It is told of the end before the parent is, who must not wait for that."""
    child = LocalProcess(Command("rank 0", Kind.RANK, ("sleep", "600"), dict(os.environ)))
    try:
        with subprocess.Popen([sys.executable, "-S", "-c", _TRACER, str(child.process.pid)], stdout=subprocess.PIPE,
                              text=True) as tracer:
            try:
                is_attached = bool(tracer.stdout.readline())
                child.signal_all(signal.SIGKILL)
                assert select.select([child.pidfd], [], [], 20.0)[0]
                assert child.exit_code() == -signal.SIGKILL
                child.close(time.monotonic() + 0.1)
            finally:
                tracer.kill()
    finally:
        with contextlib.suppress(ChildProcessError):  # without a tracer it has been reaped
            os.waitpid(child.process.pid, 0)  # the tracer has gone, so that it is ours again
    if not is_attached:
        pytest.skip("no process may trace another one here")


_LAUNCHER = """
import os, sys
from bpsfast.launch import processes, supervisor
processes.AFTER_SIGKILL_S = supervisor.AFTER_SIGKILL_S = 0.5
rank = processes.Command("rank 0", processes.Kind.RANK, tuple(sys.argv[1:]), os.environ)
sys.exit(supervisor.Supervisor([rank]).run())
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.timeout(60)
def test_a_process_that_has_become_another_user_s_is_given_up():
    """As below sudo: no signal reaches it, and the launcher says so and ends."""
    rank = ("setpriv", "--reuid=65534", "--clear-groups", "sh", "-c", "echo $$; exec sleep 600")
    with subprocess.Popen(["setpriv", "--bounding-set=-kill", sys.executable, "-c", _LAUNCHER, *rank],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        pid = int(launcher.stdout.readline().split()[-1])
        try:
            launcher.send_signal(signal.SIGTERM)
            _, err = launcher.communicate(timeout=20)
        finally:
            os.kill(pid, signal.SIGKILL)
    assert launcher.returncode == 128 + signal.SIGTERM, err
    assert "still running 0.5 s after SIGKILL: rank 0; they are left behind" in err


class Nowhere:
    """A sink that forgets all."""

    def feed(self, data: bytes) -> None:
        pass

    def finish(self) -> None:
        pass


@pytest.mark.timeout(60)
def test_processes_that_have_ended_cost_nothing_once_another_is_started(no_leaks):
    """Except one whose session has a process left: its number stays taken."""
    with selectors.DefaultSelector() as selector, contextlib.closing(LocalProcesses()) as processes:
        processes.open(selector)

        def started(*argv):
            child = processes.start(Command("rank 0", Kind.RANK, argv, dict(os.environ)), Nowhere(), Nowhere())
            return child

        def until_ended(child):
            while child.code is None or any(not pipe.source.closed for pipe in processes._pipes[child]):
                for key, _ in selector.select(10.0):
                    key.data()

        with_rest = started("sh", "-c", "sleep 600 >/dev/null 2>&1 & exit 3")
        until_ended(with_rest)
        counts = []
        for _ in range(4):
            until_ended(started("true"))
            counts.append(len(os.listdir("/proc/self/fd")))
        assert len({*counts}) == 1 and with_rest.code == 3 and not with_rest.is_released
        with_rest.signal_all(signal.SIGKILL)
