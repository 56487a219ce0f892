"""Rounds are counted modulo 2^32: by arithmetic, and by jobs whose tensors begin a few rounds before the last one."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

import bpsfast
from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.placement.partition import N_ROUNDS, round_after, rounds_ahead
from bpsfast.trainer import process
from tests.collectives import test_collective_group
from tests.support.lossy_training import counts, train, until_step
from tests.torch import test_async_weights
from tests.trainer import test_compressed_sums, test_sparse_table

LAST = N_ROUNDS - 1
FIRST = LAST - 2
EVERYWHERE = [((2, 1), "tcp", 1), ((2, 1), "shm", 1), ((2,), "auto", 0)]


@given(st.integers(0, LAST), st.integers(-(1 << 31) + 1, (1 << 31) - 1))
def test_a_round_is_ahead_of_another_by_as_many_as_follow_it(round_, n):
    assert rounds_ahead(round_after(round_, n), round_) == n and 0 <= round_after(round_, n) <= LAST


def test_the_round_after_the_last_one_is_0():
    assert round_after(LAST) == 0 and round_after(0, -1) == LAST
    assert rounds_ahead(0, LAST) == 1 and rounds_ahead(LAST, 1) == -2


@pytest.fixture(params=EVERYWHERE, ids=["tcp", "shm", "one node"])
def wrapping(request, shared_job):
    shape, transport, helpers = request.param
    started = shared_job(shape, helpers=helpers, transport=transport, partition_bytes=65536, first_round=FIRST)
    started.shape = shape
    return started


def machines(shape):
    ranks = iter(range(sum(shape)))
    return tuple(tuple(next(ranks) for _ in range(n)) for n in shape)


def test_sums_go_on(wrapping):
    assert wrapping.run(train, machines(wrapping.shape), 0, 8) == [[]] * sum(wrapping.shape)


def kept_gradients(name):
    """Return, of each step, the sum of all ranks' gradients, which lie where they are summed from."""
    rank, found = bpsfast.rank(), []
    gradients = bpsfast.Gradients({name: ((30_000,), np.float32)}, average=False)
    with pytest.raises(bpsfast.MismatchError, match="it was never ready"):
        gradients.wait(name)
    for step in range(8):
        gradients[name][:] = rank + step
        gradients.ready(name)
        found.append(float(gradients.wait(name)[-1]))
        gradients.step()
    return found


def test_gradients_go_on(wrapping):
    n = sum(wrapping.shape)
    right = [float(sum(range(n)) + n * step) for step in range(8)]
    assert wrapping.run(kept_gradients, "wrapped") == [right] * n


def test_rows_go_on(wrapping):
    n_rows = [40, 7, 0, 9]
    for found in wrapping.run(test_sparse_table.sums, "float32", False, 1000, n_rows, 6):
        for seed, (indices, values) in enumerate(found):
            given_rows = [n_rows[(rank + seed) % 4] for rank in range(4)]
            right = test_sparse_table.expected(wrapping.shape, 1000, given_rows, "float32", False, seed)
            assert np.array_equal(indices, right[0]) and values.tobytes() == right[1].tobytes()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("codec", [CodecSpec(kind="topk", k=0.1, error_feedback=True),
                                   CodecSpec(kind="onebit", error_feedback=True, momentum=0.9)], ids=["topk", "onebit"])
def test_compressed_sums_go_on(shared_job, transport, codec):
    started = shared_job((2, 1), helpers=1, transport=transport, partition_bytes=65536, first_round=FIRST)
    results = started.run(test_compressed_sums.rounds, f"wrapped {codec}", "float32", codec, 7)
    right = test_compressed_sums.expected((2, 1), "float32", codec, 7)
    assert all(result == right for result in results)


def test_weights_that_are_kept_are_not_set_anew(wrapping):
    found = wrapping.run(test_async_weights.count, 8, 0, [0.0] * 3, "wrapped")
    for rank, answers in enumerate(found):
        for step, answer in enumerate(answers):
            assert answer[rank] == step + 1 == answer.min() and answer.max() <= step + 2, (rank, step, answer)


def test_collectives_go_on(wrapping):
    for _ in range(3):
        wrapping.run(test_collective_group.sizes)


def send(n):
    """Return what came of broadcasts of many chunks, each of which takes a turn on a channel of few partitions."""
    return [bpsfast.broadcast(np.full(40_000_000, bpsfast.rank() + i, np.uint8), root_rank=i % bpsfast.size())[::997]
            .max() for i in range(n)]


def test_broadcasts_go_on(wrapping):
    for found in wrapping.run(send, 3):
        assert found == [i % sum(wrapping.shape) + i for i in range(3)]


def say_how_far():
    """Return what those say who wait for a round that is over and for one that nobody has pushed."""
    session = process.current()
    x = np.ones(100, np.float32)
    for _ in range(5):
        bpsfast.push_pull(x, name="known")
    unit = session.tensors.unit("known", 20)
    ask = session.port._stall_query.ask
    return [ask(unit.first_part, round_after(unit.round, n), "known").stage for n in (-4, -3, 0)]


def test_a_round_before_the_last_one_is_over(shared_job):
    for stages in shared_job((1, 1), transport="tcp", first_round=FIRST).run(say_how_far):
        assert stages == ["done"] * 3


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_helper_is_lost_about_the_last_round(job, tmp_path, transport):
    path = tmp_path / "step"
    started = job((1, 1, 1), helpers=2, transport=transport, placement="ps", partition_bytes=65536,
                  first_round=LAST - 15)
    started.begin(train, machines((1, 1, 1)), 0, 40, str(path))
    until_step(path, 15)
    started.lose("helper 1")
    assert [outcome.text or outcome.value for outcome in started.outcomes(60)] == [[]] * 3
    assert [recoveries for recoveries, _ in started.run(counts)] == [1] * 3


def test_a_tensor_may_begin_with_round_0(shared_job):
    codec = CodecSpec(kind="float16")
    job = shared_job((1, 1), transport="tcp", first_round=0)
    assert job.run(train, machines((1, 1)), 0, 3) == [[], []]
    results = job.run(test_compressed_sums.rounds, "from 0", "float32", codec, 3)
    assert results == [test_compressed_sums.expected((1, 1), "float32", codec, 3)] * 2
