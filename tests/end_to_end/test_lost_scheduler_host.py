"""The scheduler is lost for ever, with its machine or without it: one at the next address of the list takes over."""
from __future__ import annotations

import time

import numpy as np
import psutil
import pytest

import bpsfast
from tests.support.lossy_training import train, train_without_lost, until_step

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(120)]

#: Addresses of three machines.
HOSTS = "127.0.0.1", "127.0.0.2", "127.0.0.3"
MACHINES = ((0,), (1,), (2,))


def started_on(job, shape, **values):
    return job(shape, transport="tcp", host=HOSTS[0], next_hosts=HOSTS[1:], partition_bytes=65536, lease_s=2.0,
               heartbeat_s=0.5, **values)


def declare_new(first: int, n: int) -> list[int]:
    """Push *n* tensors that nobody has seen before; return those whose average is wrong, and meet in a barrier."""
    wrong = []
    for i in range(first, first + n):
        found = bpsfast.push_pull(np.full(40_000, bpsfast.rank() + i, np.float32), name=f"t{i}")
        if not (found == np.float32(np.mean(bpsfast.contributors(f"t{i}"))) + i).all():
            wrong.append(i)
    bpsfast.barrier()
    return wrong


def words(outcomes):
    return [outcome.text or outcome.value for outcome in outcomes]


def test_a_machine_is_lost_with_its_ranks_and_the_scheduler(job, tmp_path):
    """The others finish the step under another scheduler, and declare new tensors with it."""
    path = tmp_path / "step"
    started = started_on(job, (1, 1, 1), on_worker_loss="continue")
    started.begin(train_without_lost, MACHINES, 0, 60, str(path))
    until_step(path, 20)
    started.lose("scheduler", "node 0")
    started.lose_ranks(0)
    started.restart("scheduler 1")
    outcomes = started.outcomes(60)
    assert [each.text or each.value[0] for each in outcomes] == [[], []]
    assert outcomes[0].value[1:] == outcomes[1].value[1:], "both have the same averages"
    assert outcomes[0].value[1][-1] == (1, 2) and len(outcomes[0].value[1]) == 60 * 6, "no step is lost"
    assert started.run(declare_new, 0, 5) == [[], []]
    assert started.call("members") == [(1, 2)] * 2


def test_the_scheduler_alone_is_lost_twice(job, tmp_path):
    """Each time the next address of the list has another one; sums go on meanwhile, with the same bits."""
    path = tmp_path / "step"
    started = started_on(job, (2, 1), helpers=1)
    machines = ((0, 1), (2,))
    started.begin(train, machines, 0, 40, str(path))
    until_step(path, 10)
    started.lose("scheduler")
    until_step(path, int(path.read_text()) + 10)  # without any
    started.restart("scheduler 1")
    assert words(started.outcomes(60)) == [[]] * 3
    assert started.run(declare_new, 0, 3) == [[]] * 3
    started.lose("scheduler 1")
    started.restart("scheduler 2")
    assert started.run(declare_new, 3, 3) == [[]] * 3
    assert started.run(train, machines, 40, 45) == [[]] * 3


def test_a_scheduler_that_was_cut_off_does_not_disturb_the_next(job):
    """It is stopped until another one rules the job, and goes on then: nobody comes back to it, and it ends."""
    started = started_on(job, (1, 1, 1), start_timeout_s=10)
    assert started.run(declare_new, 0, 2) == [[]] * 3
    first = psutil.Process(started.daemons["scheduler"].pid)
    first.suspend()
    started.restart("scheduler 1")
    assert started.run(declare_new, 2, 2) == [[]] * 3
    first.resume()
    assert started.run(declare_new, 4, 2) == [[]] * 3
    old = started.daemons.pop("scheduler")
    assert old.wait(40) == 5, "it leaves the job to the other one"
    assert started.run(declare_new, 6, 2) == [[]] * 3


def test_a_helper_joins_under_the_next_scheduler(job):
    started = started_on(job, (1, 1), helpers=1, max_helpers=2)
    assert started.run(declare_new, 0, 2) == [[]] * 2
    started.lose("scheduler")
    started.restart("scheduler 1")
    assert started.run(declare_new, 2, 2) == [[]] * 2
    started.add("helper 1")
    deadline = time.monotonic() + 30
    while min(started.run(joined)) == 0:
        assert time.monotonic() < deadline
    assert started.run(declare_new, 4, 2) == [[]] * 2


def joined() -> int:
    return bpsfast.stats().counters["joined"]


def test_if_no_scheduler_comes_every_rank_is_told_by_the_deadline(job):
    started = started_on(job, (1, 1), start_timeout_s=6)
    started.run(declare_new, 0, 1)
    started.lose("scheduler")
    outcomes = started.attempt(declare_new, 1, 1000)
    for outcome in outcomes:
        assert outcome.error == "PeerLostError" and "none has answered there since" in outcome.text, outcomes
        assert all(host in outcome.text for host in HOSTS)
    started.kill()
