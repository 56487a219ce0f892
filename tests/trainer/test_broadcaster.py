"""broadcast on real ranks: any size, any root, and ranks that disagree."""
from __future__ import annotations

import array

import numpy as np
import pytest

import bpsfast
from bpsfast.trainer.broadcaster import HEADER_NBYTES, N_PARTS, PART_NBYTES, _Cursor, broadcast_bytes

CHANNEL_NBYTES = N_PARTS * PART_NBYTES


@pytest.fixture(params=[((2, 1), "tcp"), ((2, 1), "shm"), ((3,), "auto")], ids=["tcp", "shm", "one-node"])
def ranks(request, shared_job):
    shape, transport = request.param
    return shared_job(ranks=shape, transport=transport)


@pytest.fixture
def three(shared_job):
    return shared_job(ranks=(3,), transport="auto")


def many(sizes, root):
    """Broadcast arrays of these sizes one after another; return the first that came wrong."""
    for nbytes in sizes:
        want = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        x = want.copy() if bpsfast.rank() == root else np.zeros(nbytes, np.uint8)
        if bpsfast.broadcast(x, root) is not x or (x != want).any():
            return nbytes
    return None


EDGES = [0, 1, PART_NBYTES - HEADER_NBYTES - 1, PART_NBYTES - HEADER_NBYTES, PART_NBYTES - HEADER_NBYTES + 1,
         CHANNEL_NBYTES - HEADER_NBYTES, CHANNEL_NBYTES - HEADER_NBYTES + 1, 3 * CHANNEL_NBYTES + 12345, 77]


@pytest.mark.parametrize("root", [0, 2])
def test_any_size_in_one_channel(ranks, root):
    assert ranks.run(many, EDGES, root) == [None] * 3


@pytest.mark.parametrize("seed", range(3))
def test_random_sizes(ranks, seed):
    sizes = np.random.default_rng(seed).integers(0, 2 * CHANNEL_NBYTES, 6).tolist()
    assert ranks.run(many, sizes, seed) == [None] * 3


def kinds():
    rank = bpsfast.rank()
    scalar = bpsfast.broadcast(np.float64(rank + 0.5), 1)
    frozen = np.full((2, 3), rank, "i2")
    frozen.flags.writeable = False
    fresh = bpsfast.broadcast(frozen, 2, name="frozen")
    buffer = array.array("d", [rank, rank])
    same = bpsfast.broadcast(buffer, 1)
    data = bpsfast.broadcast(bytes([rank] * 5), 2)
    return float(scalar), fresh.tolist(), fresh is frozen, same is buffer, list(buffer), bytes(data)


def test_kinds_of_input(three):
    assert three.run(kinds) == [(1.5, [[2] * 3] * 2, False, True, [1.0, 1.0], b"\2" * 5)] * 3


def torch_tensor():
    import torch

    tensor = torch.full((3,), float(bpsfast.rank()), dtype=torch.bfloat16)
    return bpsfast.broadcast(tensor, 1) is tensor, tensor.tolist()


def test_torch_tensors_are_written_into(three):
    assert three.run(torch_tensor) == [(True, [1.0] * 3)] * 3


def bits():
    x = np.array([0x7FC12345, 0x80000000, 1], "u4").view("f4") if bpsfast.rank() == 0 else np.zeros(3, "f4")
    return bpsfast.broadcast(x, 0).view("u4").tolist()


def test_bits_are_kept(ranks):
    assert ranks.run(bits) == [[0x7FC12345, 0x80000000, 1]] * 3


def unknown_length():
    data = bytes(range(256)) * 5000 if bpsfast.rank() == 1 else None
    return broadcast_bytes(data, 1, "an object") == bytes(range(256)) * 5000


def test_bytes_of_unknown_length(three):
    assert three.run(unknown_length) == [True] * 3


def disagree(field):
    odd = bpsfast.rank() == 1
    x = np.ones(5 if odd and field == "shape" else 4, "i4" if odd and field == "dtype" else "f4")
    bpsfast.broadcast(x, 0, name="other" if odd and field == "name" else "own")


def after():
    return bpsfast.broadcast(np.full(3, float(bpsfast.rank())), 2).tolist()


@pytest.mark.parametrize(("field", "mine", "theirs"), [
    ("shape", "(5,)", "(4,)"), ("dtype", "int32", "float32"), ("name", "other", "own")])
def test_a_receiver_that_expects_something_else(three, field, mine, theirs):
    first, second, third = three.attempt(disagree, field)
    assert not first.error and not third.error
    assert second.error == "MismatchError" and mine in second.text and theirs in second.text and "rank 0" in second.text
    assert three.run(after) == [[2.0] * 3] * 3


def two_roots():
    bpsfast.broadcast(np.ones(4), 1 if bpsfast.rank() == 1 else 0)


def no_root():
    bpsfast.broadcast(np.ones(4), {0: 1, 1: 2, 2: 0}[bpsfast.rank()])


def test_two_roots(job):
    for outcome in job(ranks=(3,)).attempt(two_roots):
        assert outcome.error == "MismatchError" and "2 ranks took part as root" in outcome.text


@pytest.mark.parametrize("before", [0, 3])
def test_no_root(job, before):
    started = job(ranks=(3,))
    started.run(many, [100] * before, 0)
    for outcome in started.attempt(no_root):
        assert outcome.error == "MismatchError" and "root" in outcome.text


def alone_twice():
    """Rank 0 broadcasts without the others, and once more; return both errors."""
    errors = []
    bpsfast.broadcast(np.ones(4), 0)
    for _ in range(2 if bpsfast.rank() == 0 else 0):
        with pytest.raises(bpsfast.BpsError) as caught:
            bpsfast.broadcast(np.ones(4), 0)
        errors.append((type(caught.value).__name__, str(caught.value)))
    bpsfast.barrier(20)
    return errors, float(bpsfast.push_pull(np.ones(4), False, "beside")[0])


def test_a_broadcast_that_nobody_joined_closes_the_channel_but_not_the_job(job):
    started = job(ranks=(2,), timeout_s=3)
    (errors, total), (_, other) = started.run(alone_twice)
    assert total == other == 2
    assert [kind for kind, _ in errors] == ["StallError", "ClosedError"]
    assert "broadcast 2 failed (StallError" in errors[1][1]


def bad_root():
    bpsfast.broadcast(np.ones(4), 3)


def test_a_root_that_does_not_exist(three):
    for outcome in three.attempt(bad_root):
        assert outcome.error == "ConfigError" and "root_rank=3" in outcome.text


def alone():
    x = np.arange(3.0)
    frozen = bpsfast.broadcast(b"abc", 0)
    return bpsfast.broadcast(x, 0) is x, bytes(frozen)


def test_one_rank(job):
    assert job(ranks=(1,)).run(alone) == [(True, b"abc")]


def test_the_cursor_walks_over_pieces():
    cursor = _Cursor([(100, 10), (500, 0), (200, 5)])
    assert list(cursor.take(4)) == [(100, 4, 0)]
    assert list(cursor.take(8)) == [(104, 6, 0), (200, 2, 6)]
    assert list(cursor.take(8)) == [(202, 3, 0)]
    assert list(cursor.take(8)) == []
