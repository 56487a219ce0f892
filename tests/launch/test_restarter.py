"""A process that is kept: started again when a signal has ended it, and only then."""
from __future__ import annotations

import subprocess
import time

import pytest

from bpsfast.launch.daemons import describe_exit
from bpsfast.launch.restarter import N_RESTARTS, Restarter

LIMIT_S = 20.0


@pytest.fixture
def keep():
    """keep(*argv) -> (keeper, the list of all processes that it has started)."""
    kept = []

    def make(*argv):
        started = []

        def start():
            started.append(subprocess.Popen(argv))
            return started[-1]

        kept.append((Restarter("thing", start, describe_exit), started))
        return kept[-1]

    yield make
    for keeper, started in kept:
        keeper.stop()
        for process in started:
            process.kill()
            process.wait()


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_a_signal_ends_is_started_again_so_many_times(keep, caplog, no_leaks):
    keeper, started = keep("sleep", "600")
    for n in range(1, N_RESTARTS + 1):
        assert keeper.process is started[n - 1] and keeper.returns
        keeper.process.kill()
        until(lambda n=n: keeper.process is not started[n - 1])
    assert not keeper.returns
    keeper.process.kill()
    keeper._thread.join(LIMIT_S)
    assert len(started) == N_RESTARTS + 1 and keeper.process.wait() == -9
    assert f"was killed by SIGKILL: it is started again ({N_RESTARTS} of {N_RESTARTS} times)" in caplog.text
    keeper.stop()


def test_what_exits_is_not_started_again(keep):
    keeper, started = keep("false")
    keeper._thread.join(LIMIT_S)
    assert not keeper._thread.is_alive() and len(started) == 1 and keeper.process.poll() == 1


def test_what_is_no_longer_kept_stays_ended(keep):
    keeper, started = keep("sleep", "600")
    keeper.stop()
    keeper.stop()
    assert not keeper.returns and keeper.process.poll() is None
    keeper.process.kill()
    keeper.process.wait()
    assert len(started) == 1
