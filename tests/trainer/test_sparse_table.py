"""push_pull_rows on real ranks: the reference's bits in every shape of job, room that grows, every misuse."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import bpsfast
from bpsfast.base.dtypes import NAMES, TABLE
from bpsfast.base.reference_sum import reduce_rows
from bpsfast.orchestration.errors import BusyError, MismatchError, UnsupportedError
from bpsfast.trainer import process
from bpsfast.trainer.sparse_table import sparse_tables, table_of

pytestmark = pytest.mark.matrix

SHAPES = [(2, 1), "tcp", 1], [(2, 2), "shm", 0], [(1, 1), "tcp", 0], [(3,), "auto", 0]


@pytest.fixture(params=SHAPES, ids=["tcp-and-helper", "shm", "one-each", "one-node"])
def ranks(request, shared_job):
    shape, transport, n_helpers = request.param
    started = shared_job(ranks=shape, transport=transport, helpers=n_helpers)
    started.shape = shape
    return started


@pytest.fixture
def pair(shared_job):
    return shared_job(ranks=(1, 1), transport="tcp")


def drawn(rank, n_rows, n, dtype, seed=0):
    """Return n distinct rows of 3 x 2 elements."""
    draw = np.random.default_rng([seed, rank])
    indices = draw.permutation(n_rows)[:n]
    values = draw.integers(-100, 100, (n, 3, 2))
    return indices, (values / 7 if TABLE[dtype].is_float else values).astype(TABLE[dtype].numpy)


def expected(shape, n_rows, counts, dtype, average, seed=0):
    of = iter(range(sum(shape)))
    groups = []
    for n_ranks in shape:
        members = [drawn(rank, n_rows, counts[rank], dtype, seed) for rank in (next(of) for _ in range(n_ranks))]
        groups.append([(indices[np.argsort(indices)], values[np.argsort(indices)]) for indices, values in members])
    return reduce_rows(groups, average)


def sums(dtype, average, n_rows, counts, rounds):
    """Return what each round gave."""
    rank = bpsfast.rank()
    found = []
    for seed in range(rounds):
        indices, values = drawn(rank, n_rows, counts[(rank + seed) % len(counts)], dtype, seed)
        name = f"{dtype} {average} {n_rows} {counts}"
        found.append(bpsfast.push_pull_rows(indices, values, n_rows, name=name, average=average))
    return found


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dtype", NAMES)
def test_sums_of_every_dtype(ranks, dtype, average):
    counts = [20, 35, 0, 5]
    results = ranks.run(sums, dtype, average, 50, counts, 3)
    for seed in range(3):
        given = [counts[(rank + seed) % 4] for rank in range(4)]
        indices, values = expected(ranks.shape, 50, given, dtype, average, seed)
        for result in results:
            found, own = result[seed]
            assert found.dtype == np.int64 and own.dtype == TABLE[dtype].numpy and own.flags.writeable
            assert found.tolist() == indices.tolist() and own.tobytes() == values.tobytes()


def test_sums_of_many_rows_in_many_partitions(ranks):
    """300 000 rows of 24 bytes; the room is that of 16 384 at first."""
    counts = [60_000, 100_000, 3, 0]
    results = ranks.run(sums, "float32", False, 1 << 20, counts, 2)
    for seed in range(2):
        total = {}
        for rank in range(sum(ranks.shape)):
            indices, values = drawn(rank, 1 << 20, counts[(rank + seed) % 4], "float32", seed)
            for index, row in zip(indices.tolist(), values):
                total.setdefault(index, []).append(row)
        for result in results:
            found, own = result[seed]
            assert found.tolist() == sorted(total)
            for index in list(total)[::1000]:
                np.testing.assert_allclose(own[np.searchsorted(found, index)], np.sum(total[index], axis=0), rtol=1e-5)
            assert np.isclose(own.astype("f8").sum(), sum(np.sum(rows, dtype="f8") for rows in total.values()))


def growing():
    """A table of 40 MB with room for 10 rows, of which ever more are pushed; what is left behind is retired."""
    rank = bpsfast.rank()
    session = process.current()
    before = len(session.tensors.units())
    found = []
    for n in (5, 1000, 20_000, 90_000, 10):
        indices = np.arange(n) if rank == 0 else np.arange(0)
        values = np.full((len(indices), 100), n, np.float32)
        indices, values = bpsfast.push_pull_rows(indices, values, 100_000, name="growing", average=False, max_rows=10)
        found.append((len(indices), indices.tolist() == list(range(n)), bool((values == n).all())))
    table = session.extension(sparse_tables)["growing"]
    return found, len(session.tensors.units()) - before, table._n_grown, table._wire


def test_a_sum_that_needs_more_room_gets_it(ranks):
    for found, n_units, n_grown, wire in ranks.run(growing):
        assert found == [(n, True, True) for n in (5, 1000, 20_000, 90_000, 10)]
        assert n_units == 1, "editions without room are retired"
        assert 2 <= n_grown <= 4 and wire == f"growing~{n_grown}"


def repeated():
    """The same rows several times in one push; negative and odd layouts; torch tensors and halves."""
    rank = bpsfast.rank()
    indices, values = bpsfast.push_pull_rows([3, 1, 3, 3], np.arange(4, dtype=np.float64), 5, name="r1", average=False)
    size = bpsfast.size()
    assert indices.tolist() == [1, 3] and values.tolist() == [1.0 * size, 5.0 * size]
    ones = np.ones((600, 1), ml_dtypes.bfloat16)
    indices, values = bpsfast.push_pull_rows(np.zeros(600, np.uint32), ones, 1, name="r2")
    assert indices.tolist() == [0] and values.astype(float).tolist() == [[600]]
    indices, values = bpsfast.push_pull_rows(np.empty(0, np.int64), np.empty((0, 4), np.int8), 0, name="r3")
    assert indices.shape == (0,) and values.shape == (0, 4)
    huge = (1 << 40) - 1 - rank
    indices, values = bpsfast.push_pull_rows([huge], np.ones((1, 2), np.float32), 1 << 40, max_rows=8)
    assert indices.tolist() == sorted((1 << 40) - 1 - r for r in range(size)) and values.shape == (size, 2)


def test_rows_that_meet_in_one_push(ranks):
    ranks.run(repeated)


def wire_nbytes():
    counters = bpsfast.counters()
    return sum(value for name, value in counters.items() if name.startswith("wire_") and name.endswith("bytes_sent"))


def one_percent(n_rows, dim):
    """Return the bytes that this node sent for a push of 1 % of the rows, and what it holds for them."""
    draw = np.random.default_rng(bpsfast.rank())
    indices = draw.choice(n_rows, n_rows // 100, replace=False)
    values = np.ones((len(indices), dim), np.float32)
    bpsfast.push_pull_rows(indices, values, n_rows, name="percent")
    bpsfast.barrier()
    before = wire_nbytes()
    pushed = bpsfast.counters()[f"rank_{bpsfast.rank()}_pushed_bytes"]
    bpsfast.push_pull_rows(indices, values, n_rows, name="percent")
    bpsfast.barrier()
    return wire_nbytes() - before, bpsfast.counters()[f"rank_{bpsfast.rank()}_pushed_bytes"] - pushed


def test_what_travels_are_rows(pair):
    """Half of the rows go to the other node, and half of all rows come back: 1.5 % of the table, and indices."""
    n_rows, dim = 100_000, 256
    table_nbytes = 4 * n_rows * dim
    for sent, pushed in pair.run(one_percent, n_rows, dim):
        assert 0.014 * table_nbytes < sent < 0.017 * table_nbytes
        assert 0.01 * table_nbytes < pushed < 0.011 * table_nbytes


def misuse():
    rows = np.zeros((2, 3), np.float32)
    push = bpsfast.push_pull_rows
    push([0, 1], rows, 4, name="m")
    for arguments, error, text in [
        (([0, 4], rows, 4), MismatchError, "has rows 0 to 3; index 4"), (([0, -1], rows, 4), MismatchError, "index -1"),
        (([0], rows, 4), MismatchError, r"indices are of shape \(1,\), values of shape \(2, 3\)"),
        (([0.0, 1.0], rows, 4), UnsupportedError, "float64, not integers"),
        (([[0, 1]], rows, 4), MismatchError, "indices are of shape"),
        (([0, 1], rows, 5), MismatchError, r"is of shape \(4, 3\).*now of shape \(5, 3\)"),
        (([0, 1], rows[:, :2].copy(), 4), MismatchError, r"now of shape \(4, 2\)"),
        (([0, 1], rows.astype("f8"), 4), MismatchError, "dtype float64"),
        (([0, 1], rows.astype("c8"), 4), UnsupportedError, "cannot be summed"),
        ((0, np.float32(1), 4), MismatchError, "scalar"),
    ]:
        with pytest.raises(error, match=text):
            push(*arguments, name="m")
    with pytest.raises(UnsupportedError, match="at least one element"):
        push([0], np.zeros((1, 0), np.float32), 4, name="no elements")
    with pytest.raises(MismatchError, match="op of tensor 'm' differs"):
        bpsfast.push_pull(np.zeros((4, 3), np.float32), name="m")
    indices, _ = push([0, 1], rows, 4, name="m")  # nothing of that has done any harm
    assert indices.tolist() == [0, 1]
    table = table_of(process.current(), "alone", (4, 3), "float32")
    assert table is table_of(process.current(), "alone", (4, 3), np.float32)
    with pytest.raises(MismatchError, match="none were pushed"):
        table.wait()
    table.push([1], rows[:1])
    with pytest.raises(BusyError, match="were not waited for"):
        table.push([1], rows[:1])
    assert table.wait()[0].tolist() == [1] and not table.busy


def test_misuse_is_told_before_anything_is_under_way(ranks):
    ranks.run(misuse)


def different(n_rows):
    rows = np.zeros((1, 2), np.float32)
    return bpsfast.push_pull_rows([0], rows, n_rows + bpsfast.rank(), name=f"different {n_rows}")


def test_ranks_that_differ_are_named(pair):
    for outcome in pair.attempt(different, 7):
        assert outcome.error == "MismatchError" and "shape differs" in outcome.text  # whoever was first is named first
        assert "(7, 2) on rank 0" in outcome.text and "(8, 2) on rank 1" in outcome.text


def sees_no_frame():
    """Spoil the input memory behind the table's back, as a broken rank would."""
    table = table_of(process.current(), "spoilt", (100, 2), "float32")
    table.push([1], np.ones((1, 2), np.float32))
    table.wait()
    if bpsfast.rank() == 1:
        unit = table._unit
        unit.staging.array[:24].view(np.uint64)[1] = 1 << 50
        unit.wait(unit.push(), 20)
    else:
        table.push([1], np.ones((1, 2), np.float32))
        table.wait()


def test_a_malformed_frame_ends_the_job_and_names_who_sent_it(job):
    started = job(ranks=(2, 1), transport="tcp")
    for outcome in started.attempt(sees_no_frame):
        assert "rank 1 announced or sent what fits no partition" in outcome.text, outcome
    started.kill()
