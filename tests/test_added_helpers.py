"""Helpers that come while a job trains: it goes on, every sum has the bits of a job that nobody joined."""
from __future__ import annotations

import pytest

from tests.lossy_training import train, until_joined, until_step

#: Ranks of each machine, as the job has them.
SHAPES = {(1, 1): ((0,), (1,)), (2, 1): ((0, 1), (2,)), (1, 1, 1): ((0,), (1,), (2,))}


@pytest.mark.parametrize("placement", ["optimal", "ps"])
@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 1, 1)], ids=str)
def test_helpers_4_2_4(job, tmp_path, shape, transport, placement):
    machines, path = SHAPES[shape], tmp_path / "step"
    started = job(shape, helpers=4, transport=transport, placement=placement, partition_bytes=65536, log_level="info")
    started.begin(train, machines, 0, 150, str(path))
    until_step(path, 10)
    started.lose("helper 1", "helper 2")
    until_step(path, 30)
    started.add("helper 1", "helper 2")
    assert [outcome.text or outcome.value for outcome in started.outcomes(60)] == [[]] * sum(shape)
    started.run(until_joined, 2)
    assert started.run(train, machines, 150, 160) == [[]] * sum(shape)
