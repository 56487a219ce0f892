"""A helper is lost in the middle of training: the job goes on, and every sum has the bits of one that lost nobody."""
from __future__ import annotations

import pytest

from tests.lossy_training import counts, train, until_step

#: Ranks of each machine, as the job has them.
SHAPES = {(1, 1): ((0,), (1,)), (2, 1): ((0, 1), (2,)), (1, 1, 1): ((0,), (1,), (2,))}


@pytest.mark.parametrize("placement", ["optimal", "ps"])
@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 1, 1)], ids=str)
def test_the_job_goes_on_without_its_helpers(job, tmp_path, shape, transport, placement):
    machines, path = SHAPES[shape], tmp_path / "step"
    started = job(shape, helpers=2, transport=transport, placement=placement, partition_bytes=65536)
    started.begin(train, machines, 0, 60, str(path))
    until_step(path, 15)
    started.lose("helper 1")
    until_step(path, 40)
    started.lose("helper 0")
    assert [outcome.text or outcome.value for outcome in started.outcomes(60)] == [[]] * sum(shape)
    assert [recoveries for recoveries, _ in started.run(counts)] == [2] * sum(shape)
