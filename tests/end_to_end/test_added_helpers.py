"""Helpers that come while a job trains: it goes on, and every sum has the bits of one that nobody has joined."""
from __future__ import annotations

import pytest

from bpsfast.base.exit_codes import LEFT_BEHIND
from tests.support.lossy_training import changes, joined, received, train, until_step

#: Ranks of each machine, as the job has them.
SHAPES = {(1, 1): ((0,), (1,)), (2, 1): ((0, 1), (2,)), (1, 1, 1): ((0,), (1,), (2,))}


def all_right(started, timeout_s=60):
    """Whether no sum was wrong."""
    return [outcome.text or outcome.value for outcome in started.outcomes(timeout_s)] == [[]] * started.size


def train_until_joined(started, machines, n, begin=0):
    """Train on from step *begin* until every node has taken in *n* helpers; return the next step."""
    while any(found < n for found in started.run(joined)):
        assert begin < 2000, "they do not come"
        started.begin(train, machines, begin, begin + 5)
        assert all_right(started)
        begin += 5
    return begin


@pytest.mark.parametrize(("shape", "transport", "placement"), [
    ((1, 1, 1), "tcp", "optimal"), ((2, 1), "tcp", "ps"), ((1, 1), "auto", "ps"),
], ids=str)
def test_helpers_4_2_4(job, tmp_path, shape, transport, placement):
    """Over wires the new ones take over sums; those who share memory get new tensors only."""
    machines, path = SHAPES[shape], tmp_path / "step"
    started = job(shape, helpers=4, transport=transport, placement=placement, partition_bytes=65536)
    started.begin(train, machines, 0, 60, str(path))
    until_step(path, 10)
    started.lose("helper 1", "helper 2")
    until_step(path, 20)
    started.add("helper 1", "helper 2")
    assert all_right(started)
    newcomers = [len(shape) + 4, len(shape) + 5]
    begin = train_until_joined(started, machines, 2, 60)
    before = started.run(received, newcomers)
    assert started.run(train, machines, begin, begin + 5) == [[]] * sum(shape)
    after = started.run(received, newcomers)
    if transport == "tcp":
        assert all(late > early for rank in range(sum(shape)) for early, late in zip(before[rank], after[rank]))


def test_a_helper_comes_while_another_is_lost(job):
    machines, begin = SHAPES[1, 1, 1], 0
    started = job((1, 1, 1), helpers=2, max_helpers=3, transport="tcp", placement="ps", partition_bytes=65536)
    for n, lost in enumerate(["helper 0", "helper 1", "helper 2"]):
        started.add(f"helper {n + 2}")
        if n == 1:
            begin = train_until_joined(started, machines, n + 1, begin)
        started.begin(train, machines, begin, begin + 10)
        started.lose(lost)
        assert all_right(started)
        begin = train_until_joined(started, machines, n + 1, begin + 10)
    assert [recoveries for recoveries, _ in started.run(changes)] == [3, 3, 3]


def test_newcomers_that_are_killed_at_once_are_nobodys_loss(job, tmp_path):
    machines, path = SHAPES[1, 1], tmp_path / "step"
    started = job((1, 1), helpers=1, max_helpers=2, transport="tcp", placement="ps", partition_bytes=65536)
    started.begin(train, machines, 0, 80, str(path))
    for i in range(1, 5):
        until_step(path, 10 * i)
        started.add(f"helper {i}")
        until_step(path, 10 * i + 2 * i)
        started.lose(f"helper {i}")
    assert all_right(started)


def test_three_come_at_once(job):
    machines = SHAPES[1, 1, 1]
    started = job((1, 1, 1), helpers=1, max_helpers=4, transport="tcp", placement="optimal", partition_bytes=65536)
    started.add("helper 1", "helper 2", "helper 3")
    begin = train_until_joined(started, machines, 3)
    assert started.run(train, machines, begin, begin + 5) == [[]] * 3
    assert [recoveries for recoveries, _ in started.run(changes)] == [0, 0, 0]


def test_a_helper_of_another_setting_is_refused_and_the_job_goes_on(job):
    machines = SHAPES[1, 1]
    started = job((1, 1), helpers=1, max_helpers=2, transport="tcp", placement="ps", partition_bytes=65536)
    started.add("helper 1", BPSFAST_TRANSPORT="auto")
    assert started.daemons.pop("helper 1").wait(60) == LEFT_BEHIND
    assert started.run(train, machines, 0, 5) == [[]] * 2


def test_a_helper_that_was_not_asked_for_is_refused_and_the_job_goes_on(job, tmp_path):
    """It holds the key, and takes no part; one that replaces a lost one does, at once."""
    machines, path = SHAPES[1, 1], tmp_path / "step"
    started = job((1, 1), helpers=1, transport="tcp", placement="ps", partition_bytes=65536)
    started.begin(train, machines, 0, 40, str(path))
    until_step(path, 5)
    started.add("helper 1")
    assert started.daemons.pop("helper 1").wait(60) == LEFT_BEHIND
    assert all_right(started) and started.run(joined) == [0, 0]
    started.lose("helper 0")
    started.add("helper 0")
    train_until_joined(started, machines, 1, 40)
