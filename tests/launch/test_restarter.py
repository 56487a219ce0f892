"""Tests that a daemon is started again when a signal has ended it, and only then."""
from __future__ import annotations

import subprocess
import time

import pytest

from bpsfast.launch.daemons import N_RESTARTS, Restarter

LIMIT_S = 20.0


@pytest.fixture
def keep():
    """keep(*argv) -> (restarter, the list of all processes that it has started)."""
    kept = []

    def make(*argv):
        started = []

        def start():
            started.append(subprocess.Popen(argv))
            return started[-1]

        kept.append((Restarter("thing", start), started))
        return kept[-1]

    yield make
    for restarter, started in kept:
        restarter.stop()
        for process in started:
            process.kill()
            process.wait()


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_a_signal_ends_is_started_again_so_many_times(keep, caplog, no_leaks):
    restarter, started = keep("sleep", "600")
    for n in range(1, N_RESTARTS + 1):
        assert restarter.process is started[n - 1] and restarter.will_restart
        restarter.process.kill()
        until(lambda n=n: restarter.process is not started[n - 1])
    assert not restarter.will_restart
    restarter.process.kill()
    restarter._thread.join(LIMIT_S)
    assert len(started) == N_RESTARTS + 1 and restarter.process.wait() == -9
    assert f"was killed by SIGKILL: it is started again ({N_RESTARTS} of {N_RESTARTS} times)" in caplog.text
    restarter.stop()


def test_what_exits_is_not_started_again(keep):
    restarter, started = keep("false")
    restarter._thread.join(LIMIT_S)
    assert not restarter._thread.is_alive() and len(started) == 1 and restarter.process.poll() == 1


def test_what_is_no_longer_kept_stays_ended(keep):
    restarter, started = keep("sleep", "600")
    restarter.stop()
    restarter.stop()
    assert not restarter.will_restart and restarter.process.poll() is None
    restarter.process.kill()
    restarter.process.wait()
    assert len(started) == 1
