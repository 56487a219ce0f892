"""The scheduler is lost in the middle of training: data goes on, another one learns all, every sum has the same bits."""
from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import bpsfast
from tests.lossy_training import counts, train, until_step

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
