"""Numbers of a real job: steps, bytes, who is late; what one rank sees agrees with what it did."""
from __future__ import annotations

import json
import threading

import numpy as np
import pytest

import bpsfast

N_STEPS, LATE_S, N_ELEMENTS = 12, 0.03, 50_000
NBYTES = 4 * N_ELEMENTS * 2


def train():
    """Two names a step; rank 3 computes for longer than the others."""
    one = np.ones(N_ELEMENTS, np.float32)
    for _ in range(N_STEPS):
        if bpsfast.rank() == 3:
            threading.Event().wait(LATE_S)
        handles = [bpsfast.push_pull_async(one, True, name) for name in ("a", "b")]
        for handle in handles:
            bpsfast.synchronize(handle)
    bpsfast.barrier()
    found = bpsfast.stats(job=True)
    bpsfast.barrier()
    return found


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_slow_rank_is_found_and_times_and_bytes_add_up(job, transport):
    found = job(ranks=(2, 2), transport=transport).run(train)
    for rank, stats in enumerate(found):
        assert (stats.rank, stats.node, stats.steps) == (rank, rank // 2, N_STEPS - 2)
        assert stats.mean.step_s >= LATE_S
        assert stats.mean.step_s == pytest.approx(stats.mean.compute_s + stats.mean.exposed_s)
        assert stats.pushed_bytes == stats.pulled_bytes == N_STEPS * NBYTES
        assert (stats.sent_bytes > 0) == (stats.received_bytes > 0) == (transport == "tcp")
        assert stats.partition_bytes == 4_096_000 and stats.queued == 0 and stats.stalls == ()
        assert 0.0 <= stats.mean.overlap <= 1.0 and stats.last.step_s > 0
        assert stats.silent_nodes == () and [lag.rank for lag in stats.job_lags] == [0, 1, 2, 3]
        late = stats.job_lags[3]
        assert late.count == 2 * N_STEPS and late.mean_s > 0.3 * LATE_S, stats.job_lags
        assert late.last_share > 0.6 and late.last_share == max(lag.last_share for lag in stats.job_lags)
        assert sum(lag.last_share for lag in stats.job_lags) == pytest.approx(1.0, abs=0.01)
        assert [lag.rank for lag in stats.local_lags] == [2 * stats.node, 2 * stats.node + 1]
        assert json.loads(stats.json())["mean"]["exposed_s"] == pytest.approx(stats.mean.exposed_s)
    assert found[3].mean.compute_s > LATE_S > found[0].mean.compute_s
    assert found[0].mean.exposed_s > 0.5 * LATE_S
    second, third = found[2].local_lags
    assert third.last_share > 0.8 and third.mean_s > 0.3 * LATE_S > second.mean_s
    assert third.mean_s <= third.p99_s <= third.max_s


def test_speed_is_bytepss():
    from bpsfast import torch

    assert torch.get_pushpull_speed is bpsfast.get_pushpull_speed


def test_before_init_there_is_nothing_to_tell():
    for name in ("stats", "counters", "stalls", "get_pushpull_speed"):
        with pytest.raises(bpsfast.ClosedError, match=r"call bpsfast\.init"):
            getattr(bpsfast, name)()
