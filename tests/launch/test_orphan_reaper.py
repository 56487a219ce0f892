"""Tests that all processes below a launcher end with it: below shells, in other groups and sessions, on other hosts."""
from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bpsfast.base import process_identity

_LAUNCHER = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever runs the tests (nohup) may ignore it
from bpsfast.launch.processes import Command, Kind
from bpsfast.launch.supervisor import Limits, Supervisor
print("launcher", os.getpid(), flush=True)
sys.exit(Supervisor([Command("rank 0", Kind.RANK, tuple(sys.argv[1:]), os.environ)], limits=Limits(job_s=60.0)).run())
"""
#: A rank that lets nothing but SIGKILL end it.
_RANK = ("import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
         "print('rank', os.getpid(), os.getppid(), flush=True); time.sleep(600)")
_PYTHON = f'{sys.executable} -S -c "$0"'
_WRAPPERS = {
    "shell": ("sh", "-c", f"{_PYTHON}; echo done", _RANK),
    "background": ("bash", "-c", f"{_PYTHON} & wait", _RANK),
    "other group": ("sh", "-c", f"timeout 600 {_PYTHON}; echo done", _RANK),
    "other session": ("sh", "-c", f"setsid -w {_PYTHON}; echo done", _RANK),
    "no environment": ("sh", "-c", f"env -i {_PYTHON}; echo done", _RANK),
    "orphan": ("bash", "-c", f"(setsid {_PYTHON} &) ; sleep 600", _RANK),
}
#: SIGKILL comes to other sessions after 4 s.
_WITHIN_S = 20.0


def started(*argv: str, **environ: str) -> subprocess.Popen:
    """Start a launcher."""
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                            env={**os.environ, **environ})


def rank_of(launcher: subprocess.Popen) -> tuple[int, int]:
    """Return the process that the launcher has started in the end, and its parent, from what it prints."""
    for line in launcher.stdout:
        if "rank" in (words := line.split()):
            return int(words[-2]), int(words[-1])
    raise AssertionError("it has said nothing")


def guardian_of(launcher: int) -> int:
    """Return the guardian of a launcher."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := process_identity.stat(int(name))) and fields[1] == str(launcher):
            if b"orphan_reaper.py" in Path(f"/proc/{name}/cmdline").read_bytes():
                return int(name)
    raise AssertionError("it has none")


def has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], _WITHIN_S)[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("wrapper", _WRAPPERS)
def test_a_rank_below_a_wrapper_ends_with_its_launcher(wrapper, number, pidfd_of):
    with started(sys.executable, "-c", _LAUNCHER, *_WRAPPERS[wrapper]) as launcher:
        rank = pidfd_of(rank_of(launcher)[0])
        guardian = pidfd_of(guardian_of(launcher.pid))
        launcher.send_signal(number)
        assert has_ended(rank), "the rank goes on"
        assert has_ended(guardian), "the guardian stays behind"
        assert launcher.wait(_WITHIN_S) == (-number if number == signal.SIGKILL else 128 + number)


@pytest.mark.slow
def test_a_guardian_that_is_killed_is_replaced(pidfd_of):
    with started(sys.executable, "-c", _LAUNCHER, *_WRAPPERS["shell"]) as launcher:
        rank = pidfd_of(rank_of(launcher)[0])
        first = guardian_of(launcher.pid)
        end = pidfd_of(first)
        os.kill(first, signal.SIGKILL)
        assert has_ended(end)
        second = None
        while second in (None, first):
            try:
                second = guardian_of(launcher.pid)
            except (AssertionError, FileNotFoundError, ProcessLookupError):
                assert launcher.poll() is None
        launcher.kill()
        assert has_ended(rank)


@pytest.mark.slow
def test_what_a_good_job_leaves_in_a_session_of_its_own_stays(pidfd_of):
    """It is a daemon of the user's: one that goes on to send what the job has logged, for example."""
    with started(sys.executable, "-c", _LAUNCHER, "bash", "-c",
                 "read daemon < <(setsid sh -c 'echo $$; exec sleep 600 >/dev/null 2>&1'); "  # once it has left
                 "echo rank $daemon $$; sleep 600 & echo rank $! $$") as launcher:
        (daemon, _), (left, _) = rank_of(launcher), rank_of(launcher)
        assert launcher.wait(_WITHIN_S) == 0
        try:
            assert process_identity.start_time(left) == "gone"
            assert process_identity.start_time(daemon) != "gone"
        finally:
            os.kill(daemon, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("run", "-n", "1"), ("run", "-H", "localhost"), ("dmlc",)])
def test_of_every_kind_of_launcher(arguments, pidfd_of):
    environ = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"} if arguments == ("dmlc",) else {}
    with started(sys.executable, "-m", "bpsfast", *arguments, "--", *_WRAPPERS["shell"], **environ) as launcher:
        rank = pidfd_of(rank_of(launcher)[0])
        launcher.kill()
        assert has_ended(rank)


@pytest.mark.slow
def test_an_agent_that_is_killed_leaves_nothing(pidfd_of):
    with started(sys.executable, "-m", "bpsfast", "run", "-H", "localhost", "--", *_WRAPPERS["shell"]) as launcher:
        number, shell = rank_of(launcher)
        rank = pidfd_of(number)
        agent = int(process_identity.stat(shell)[1])
        assert agent != launcher.pid
        os.kill(agent, signal.SIGKILL)
        assert has_ended(rank)
        assert launcher.wait(_WITHIN_S) == 255, "lost with its host"
