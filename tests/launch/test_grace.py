"""The supervisor's grace period after SIGTERM: the ranks get it first, and end by themselves or are ended."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from bpsfast.base.exit_codes import ABORTED, JOB_TIMEOUT

#: Runs the commands of argv[1], a list of name, kind and program, with argv[2] seconds of grace, for argv[3] at most.
_LAUNCHER = """
import json, os, sys
from bpsfast.launch.processes import Command, Kind
from bpsfast.launch.supervisor import Limits, Supervisor
commands = [Command(name, Kind(kind), (sys.executable, "-S", "-c", text), os.environ)
            for name, kind, text in json.loads(sys.argv[1])]
limits = Limits(job_s=float(sys.argv[3]), after_failure_s=0.3, after_ranks_s=0.3, grace_s=float(sys.argv[2]))
sys.exit(Supervisor(commands, limits=limits).run())
"""
#: Ends with 0 some time after SIGTERM, its other word.
_SAVES = """
import signal, sys, time
def save(*_):
    print("saves", flush=True)
    WORK
    sys.exit(CODE)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
_PLAIN = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)"
_STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _PLAIN


def saves(work: str = "time.sleep(0.5)", code: int = 0) -> str:
    return _SAVES.replace("WORK", work).replace("CODE", str(code))


def launch(*commands: tuple[str, str, str], grace_s: float = 30.0, job_s: float = 60.0) -> subprocess.Popen:
    """Start a launcher of *commands* and return once all of them run."""
    job = subprocess.Popen([sys.executable, "-c", _LAUNCHER, json.dumps(commands), str(grace_s), str(job_s)],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in commands:
        assert "ready" in job.stdout.readline()
    return job


def end(job: subprocess.Popen, *numbers: int, timeout_s: float = 20.0) -> tuple[int, str, str]:
    """Send signals and return exit code, output and error output; all must come in time."""
    with job:
        for number in numbers:
            job.send_signal(number)
        try:
            out, err = job.communicate(timeout=timeout_s)
        finally:
            job.kill()
    return job.returncode, out, err


def test_ranks_end_by_themselves_and_the_job_with_0():
    """A daemon gets no signal while they do, and may need the usual time after them."""
    daemon = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('too early', flush=True))\n" + _PLAIN
    slow = saves("time.sleep(1.0)\n    print('done', flush=True)")
    job = launch(("rank 0", "rank", saves()), ("rank 1", "rank", slow), ("node 0", "daemon", daemon))
    code, out, err = end(job, signal.SIGTERM)
    assert (code, out.count("saves")) == (0, 2), err
    assert "got SIGTERM: the ranks have 30 s to end" in err and "ending all" not in err
    lines = out.splitlines()
    assert not any("too early" in line for line in lines[:lines.index("[rank 1] done")])


def test_programs_without_a_handler_end_at_once():
    code, _, err = end(launch(("rank 0", "rank", _PLAIN), ("rank 1", "rank", _PLAIN)), signal.SIGTERM)
    assert code == 128 + signal.SIGTERM and "got SIGTERM: ending all processes" in err
    assert "failed first" not in err


@pytest.mark.parametrize("first", [_PLAIN, saves("time.sleep(0.1)", 128 + signal.SIGTERM)])
def test_who_ends_by_the_signal_leaves_the_others_their_time(first):
    """Also if that is why they fail then."""
    daemon = f"import time\nprint('ready', flush=True)\ntime.sleep(1.0)\nraise SystemExit({ABORTED})"
    job = launch(("rank 0", "rank", first), ("node 0", "daemon", daemon),
                 ("rank 1", "rank", saves("time.sleep(3.0)\n    print('done', flush=True)", 1)))
    code, out, err = end(job, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM and "done" in out and "failed first" not in err, err


def test_a_signal_that_comes_twice_at_once_is_one():
    """timeout(1) sends it to the launcher, and then to its group."""
    job = launch(("rank 0", "rank", saves("time.sleep(0.5)")))
    code, out, err = end(job, signal.SIGTERM, signal.SIGTERM)
    assert code == 0 and "saves" in out, err


def test_the_deadline_of_the_job_holds():
    job = launch(("rank 0", "rank", saves("time.sleep(600)")), job_s=4.0)
    code, _, err = end(job, signal.SIGTERM)
    assert code == JOB_TIMEOUT and "the job has not ended within 4 s" in err


def test_a_reader_that_has_stopped_holds_up_nobody():
    text = saves("print('x' * (1 << 20), flush=True)\n    print('y' * (1 << 20), flush=True)")
    job = launch(("rank 0", "rank", text))
    job.send_signal(signal.SIGTERM)
    with job:
        try:
            assert job.wait(20.0) == 0
        finally:
            job.kill()


def test_who_does_not_end_in_time_is_named_and_ended():
    began_s = time.monotonic()
    job = launch(("rank 0", "rank", saves()), ("rank 1", "rank", _STUBBORN), grace_s=2.0)
    code, out, err = end(job, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM and "saves" in out
    assert "got SIGTERM 2 s ago, and rank 1 has not ended: ending all processes" in err
    assert time.monotonic() - began_s >= 2.0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_everything_at_once(second):
    job = launch(("rank 0", "rank", saves("time.sleep(600)")))
    job.send_signal(signal.SIGTERM)
    assert "saves" in job.stdout.readline()
    time.sleep(1.1)  # within a second it would count as the same signal
    code, _, err = end(job, second, timeout_s=10.0)
    assert code == 128 + second and f"got {second.name}: killing all processes" in err


def test_a_rank_that_fails_meanwhile_is_the_cause():
    failing, slow = saves("raise ValueError('no space')"), saves("time.sleep(600)")
    job = launch(("rank 0", "rank", failing), ("rank 1", "rank", slow))
    code, _, err = end(job, signal.SIGTERM)
    assert code == 1 and "rank 0 failed first: it ended with exit code 1" in err and "no space" in err


def test_sigint_gives_no_grace():
    code, _, err = end(launch(("rank 0", "rank", saves("time.sleep(600)"))), signal.SIGINT)
    assert code == 128 + signal.SIGINT and "got SIGINT: ending all processes" in err


def test_children_of_a_rank_get_no_signal_in_the_grace_period():
    text = ("import subprocess\nchild = subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3)\n"
            + saves("time.sleep(0.5)\n    print('child', child.poll(), flush=True)"))
    code, out, err = end(launch(("rank 0", "rank", text)), signal.SIGTERM)
    assert code == 0 and "child None" in out, err


def test_a_helper_that_is_lost_meanwhile_is_no_failure(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    helper = f"import os\nprint('ready', flush=True)\nopen({str(gate)!r}).read()\nos.kill(os.getpid(), 9)"
    rank = saves(f"open({str(gate)!r}, 'w').close()\n    time.sleep(1.0)")
    code, out, err = end(launch(("rank 0", "rank", rank), ("helper 0", "helper", helper)), signal.SIGTERM)
    assert code == 0 and "saves" in out and "helper 0 was killed by SIGKILL: the job goes on without it" in err
