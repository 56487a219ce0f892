"""The scheduler is lost in the middle of training: data goes on, another one learns all, sums have the same bits."""
from __future__ import annotations

import os
import signal
import time

import numpy as np
import psutil
import pytest

import bpsfast
from bpsfast.base.exit_codes import ABORTED
from tests.support.lossy_training import counts, train, until_step

pytestmark = pytest.mark.matrix

#: Ranks of each machine, as the job has them.
SHAPES = {(2,): ((0, 1),), (1, 1): ((0,), (1,)), (2, 1): ((0, 1), (2,))}


def values(outcomes):
    return [outcome.text or outcome.value for outcome in outcomes]


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_goes_on_under_another_scheduler(job, tmp_path, shape, transport):
    path = tmp_path / "step"
    started = job(shape, helpers=1, transport=transport, partition_bytes=65536)
    started.begin(train, SHAPES[shape], 0, 60, str(path))
    until_step(path, 10)
    started.lose("scheduler")
    until_step(path, int(path.read_text()) + 10)  # without any
    started.restart("scheduler")
    assert values(started.outcomes(60)) == [[]] * sum(shape)
    assert started.run(train, SHAPES[shape], 60, 65) == [[]] * sum(shape)
    assert [recoveries for recoveries, _ in started.run(counts)] == [0] * sum(shape)


def declare_and_meet(begin: int, end: int) -> list[str]:
    """Push tensors that nobody has seen before, and meet in a barrier after each; return what is wrong."""
    wrong = []
    for i in range(begin, end):
        found = bpsfast.push_pull(np.full(40_000, bpsfast.rank() + i, np.float32), name=f"t{i}", average=False)
        right = sum(rank + i for rank in range(bpsfast.size()))
        if not (found == right).all():
            wrong.append(f"t{i}")
        bpsfast.barrier()
    return wrong


@pytest.mark.parametrize("times", [1, 3])
def test_tensors_are_declared_and_barriers_met_across_losses(job, times):
    started = job((1, 1), helpers=1, transport="tcp", placement="ps", partition_bytes=65536)
    started.begin(declare_and_meet, 0, 150)
    for _ in range(times):
        time.sleep(0.15)  # somewhere in the middle
        started.lose("scheduler")
        started.restart("scheduler")
    assert values(started.outcomes(60)) == [[]] * 2
    assert started.run(declare_and_meet, 150, 155) == [[]] * 2


def test_a_helper_is_lost_while_there_is_no_scheduler(job, tmp_path):
    path = tmp_path / "step"
    started = job((1, 1), helpers=2, transport="tcp", placement="ps", partition_bytes=65536)
    started.begin(train, SHAPES[1, 1], 0, 60, str(path))
    until_step(path, 10)
    started.lose("scheduler", "helper 0")
    time.sleep(3.0)  # longer than workers wait for a scheduler's word where there is one
    started.restart("scheduler")
    assert values(started.outcomes(60)) == [[]] * 2
    assert [recoveries for recoveries, _ in started.run(counts)] == [1, 1]


@pytest.mark.parametrize("later_s", [0.0, 0.01, 0.03])
def test_the_scheduler_is_lost_while_the_job_recovers_from_a_lost_helper(job, tmp_path, later_s):
    path = tmp_path / "step"
    started = job((1, 1, 1), helpers=2, transport="tcp", placement="ps", partition_bytes=65536)
    started.begin(train, ((0,), (1,), (2,)), 0, 50, str(path))
    until_step(path, 10)
    started.lose("helper 0")
    time.sleep(later_s)
    started.lose("scheduler")
    started.restart("scheduler")
    assert values(started.outcomes(60)) == [[]] * 3
    assert all(recoveries >= 1 for recoveries, _ in started.run(counts))


@pytest.mark.parametrize("hang_s", [1.0, 5.0], ids=["half the lease", "longer than the lease"])
def test_a_scheduler_that_hangs_goes_on_later(job, tmp_path, hang_s):
    path = tmp_path / "step"
    started = job((1, 1), helpers=1, transport="tcp", lease_s=2.0, heartbeat_s=0.5, partition_bytes=65536)
    started.begin(train, SHAPES[1, 1], 0, 200, str(path))
    until_step(path, 10)
    scheduler = started.daemons["scheduler"]
    scheduler.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, scheduler.pid, os.WSTOPPED)
    time.sleep(hang_s)
    scheduler.send_signal(signal.SIGCONT)
    assert values(started.outcomes(60)) == [[]] * 2
    assert started.run(declare_and_meet, 0, 3) == [[]] * 2


def test_without_another_scheduler_every_rank_is_told_by_the_deadline(job):
    started = job((2, 1), helpers=1, transport="tcp", start_timeout_s=6)
    started.run(declare_and_meet, 0, 1)
    started.lose("scheduler")
    begin = time.monotonic()
    outcomes = started.attempt(declare_and_meet, 1, 1000)
    assert 4 < time.monotonic() - begin < 6 + 4
    for outcome in outcomes:
        assert outcome.error == "PeerLostError" and "none has answered there since" in outcome.text, outcomes
    assert started.daemons["helper 0"].wait(20) == ABORTED
    started.kill()


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_job_that_ends_without_a_scheduler_ends_well(job, transport):
    started = job((2, 1), helpers=1, transport=transport, start_timeout_s=60)
    started.run(declare_and_meet, 0, 2)
    started.lose("scheduler")
    begin = time.monotonic()
    started.close()  # all exit codes are 0
    assert time.monotonic() - begin < 20


def test_some_leave_without_a_scheduler_and_the_others_under_the_next(job):
    started = job((1, 1), helpers=1, transport="tcp")
    started.run(declare_and_meet, 0, 2)
    started.lose("scheduler")
    started._send(None, "shutdown", (), (0,))
    started.begin(sleep_a_little, only=(1,))
    started.outcomes(only=(1,))
    started.restart("scheduler")
    await_connections(started.daemons["scheduler"].pid, 3)  # else they may all be gone before it listens
    started._send(None, "shutdown", (), (1,))
    assert values(started.outcomes(20)) == [None, None]
    started._attached = False


def await_connections(pid: int, n: int) -> None:
    """Wait until *n* others are connected to the daemon *pid*."""
    deadline = time.monotonic() + 30
    while sum(each.status == psutil.CONN_ESTABLISHED for each in psutil.Process(pid).net_connections("tcp")) < n:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sleep_a_little() -> None:
    """A rank that is busy with something else."""
    time.sleep(1.0)
