"""How `bpsfast.preempted` handles SIGTERM in its process; whole jobs are in tests/end_to_end/test_preempted_jobs.py."""
from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_BEFORE = """
import os, signal, sys, threading, time
from bpsfast.orchestration.errors import UnsupportedError
from bpsfast.trainer.preemption import SigtermNotice
in_job = [True]
notice = SigtermNotice(lambda: in_job[0])
def tell(): os.kill(os.getpid(), signal.SIGTERM)
"""


def ended(program: str) -> tuple[int, str]:
    """Return the exit code and the output of *program*."""
    done = subprocess.run([sys.executable, "-c", _BEFORE + program], capture_output=True, text=True, timeout=60,
                          check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_the_signal_is_noted_and_ends_nothing_any_more():
    assert ended("notice.install(); assert not notice.has_come\ntell(); assert notice.has_come\n"
                 "in_job[0] = False\ntell(); print('goes on')") == (0, "goes on\n")


def test_outside_of_a_job_it_ends_the_process():
    assert ended("notice.install(); in_job[0] = False\ntell(); signal.pause()") == (-signal.SIGTERM, "")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_program_is_called_as_well(when):
    """One that is set later calls ours, as handlers do that do not own a signal."""
    own = "def own(*a): print('own'); (earlier(*a) if callable(earlier) else None)\nearlier = signal.signal(15, own)\n"
    program = f"{own}notice.install()\n" if when == "before" else f"notice.install()\n{own}notice.install()\n"
    assert ended(program + "tell(); tell(); print(notice.has_come)") == (0, "own\nown\nTrue\n")


def test_a_fork_ends_as_before():
    assert ended("""
os.register_at_fork(after_in_child=notice.leave)
notice.install()
source, target = os.pipe()
child = os.fork()
if child == 0:
    print(signal.getsignal(15) is signal.SIG_DFL, flush=True)
    os.write(target, b".")
    signal.pause()
os.read(source, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), notice.has_come)
""") == (0, "True\n-15 False\n")


def test_another_thread_cannot_begin():
    assert ended("""
def begin():
    try:
        notice.install()
    except UnsupportedError as exc:
        print(exc)
thread = threading.Thread(target=begin, name="worker")
thread.start(); thread.join()
notice.install()  # nothing is lost
print(signal.getsignal(15) == notice._note)
""") == (0, "the first call of bpsfast.preempted() is made in thread 'worker': make it in the main thread, where alone "
                "Python sets signal handlers\nTrue\n")


def test_a_lone_rank_is_told_at_once():
    program = """
import bpsfast
bpsfast.init()
print(bpsfast.preempted())
tell()
print(bpsfast.preempted(), bpsfast.preempted())
bpsfast.shutdown()
bpsfast.init()
print(bpsfast.preempted())  # who was told to end stays told
bpsfast.shutdown()
"""
    assert ended(program) == (0, "False\nTrue True\nTrue\n")
