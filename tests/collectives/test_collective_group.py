"""Collectives of a group by their definition: in jobs of every shape, of all ranks and of some, every op and dtype."""
from __future__ import annotations

import functools
import itertools
import os
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import bpsfast
from bpsfast.collectives import chunk_stream
from bpsfast.collectives.chunk_stream import ChunkSize
from bpsfast.collectives.group import make_group
from bpsfast.orchestration.errors import ClosedError, ConfigError, MismatchError, StallError, UnsupportedError
from bpsfast.trainer import process
from bpsfast.trainer.tensor_input import tensor_input

pytestmark = pytest.mark.matrix

INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
FLOATS = ("float32", "float64", "float16", "bfloat16")
BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
OPS = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum, **BITWISE}
#: One strip of each pipe and less, several, and tails of every kind.
SIZES = (0, 1, 1023, 1025, 40_000, 70_000, 300_001)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def given(rank, dtype, n):
    """Small integers: sums and products of four are exact in every dtype."""
    return ((np.arange(n) + 3 * rank) % 3 + (rank % 2)).astype(dtype_of(dtype))


def wanted(ranks, dtype, n, op):
    inputs = [given(rank, dtype, n) for rank in ranks]
    if op != "avg":
        return functools.reduce(OPS[op], inputs).astype(dtype_of(dtype))
    total = sum(each.astype(np.int64 if dtype in INTEGERS else np.float64) for each in inputs)
    return (total // len(ranks) if dtype in INTEGERS else total / len(ranks)).astype(dtype_of(dtype))


def same(x, y):
    return x.dtype == y.dtype and np.array_equal(x.view(np.uint8), y.view(np.uint8))


def whole():
    session = process.current()
    return make_group(session, range(session.size))


def reductions(dtype):
    group = whole()
    for op in (*OPS, "avg"):
        if dtype in FLOATS and op in BITWISE:
            continue
        x = given(group.rank, dtype, 1500)
        out, root = np.empty_like(x), group.size - 1
        expected = wanted(range(group.size), dtype, 1500, op)
        group.all_reduce(tensor_input(x), tensor_input(out), op)
        assert same(out, expected), (dtype, op)
        out[:] = 0
        group.reduce(tensor_input(x), tensor_input(out) if group.rank == root else None, root, op)
        assert same(out, expected if group.rank == root else np.zeros_like(x)), (dtype, op)
        parts = [given(group.rank + i, dtype, 100 + i) for i in range(group.size)]
        mine = np.empty(100 + group.rank, dtype_of(dtype))
        group.reduce_scatter([tensor_input(part) for part in parts], tensor_input(mine), op)
        # what member j gave for this one is that of "rank" j + this
        assert same(mine, wanted([group.rank + j for j in range(group.size)], dtype, len(mine), op)), (dtype, op)
        group.all_reduce(tensor_input(x), tensor_input(x), op)
        assert same(x, expected), "in place"
    group.close()


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_reductions_by_every_op(everywhere, dtype):
    everywhere.run(reductions, dtype)


def sizes():
    group = whole()
    for n in SIZES:
        x = given(group.rank, "float32", n)
        out = np.empty_like(x)
        group.all_reduce(tensor_input(x), tensor_input(out))
        assert same(out, wanted(range(group.size), "float32", n, "sum")), n
        for root in range(group.size):
            x = given(group.rank, "int16", n)
            group.broadcast(tensor_input(x), root)
            assert same(x, given(root, "int16", n)), (n, root)
        lengths = [n + 7 * i for i in range(group.size)]
        outs = [np.zeros(length, "uint8") for length in lengths]
        outs[group.rank][:] = given(group.rank, "uint8", lengths[group.rank])
        group.all_gather(tensor_input(outs[group.rank]), [tensor_input(out) for out in outs])
        for i, out in enumerate(outs):
            assert same(out, given(i, "uint8", lengths[i])), (n, i)
        xs = [given(group.rank + 10 * i, "int32", n + i) for i in range(group.size)]
        outs = [np.empty(n + group.rank, "int32") for _ in range(group.size)]
        group.all_to_all([tensor_input(x) for x in xs], [tensor_input(out) for out in outs])
        for i, out in enumerate(outs):
            assert same(out, given(i + 10 * group.rank, "int32", n + group.rank)), (n, i)
        root, mine = n % group.size, given(group.rank, "float64", n)
        outs = [np.empty(n) for _ in range(group.size)] if group.rank == root else []
        group.gather(tensor_input(mine), [tensor_input(out) for out in outs], root)
        assert all(same(out, given(i, "float64", n)) for i, out in enumerate(outs))
        out = np.empty(n)
        group.scatter([tensor_input(x) for x in outs], tensor_input(out), root)
        assert same(out, mine), "what was gathered is scattered again"
        group.barrier()
    group.close()


def test_loads_of_any_size_come_through_whole(everywhere):
    everywhere.run(sizes)


def subgroups():
    """Every pair of ranks, both ways round: sums, copies, and groups that go on at the same time."""
    session = process.current()
    done = []
    for ranks in itertools.permutations(range(session.size), min(2, session.size)):
        if session.rank not in ranks:
            continue
        group = make_group(session, ranks)
        assert ranks[group.rank] == session.rank
        x = given(session.rank, "float32", 70_000)
        group.all_reduce(tensor_input(x), tensor_input(x), "avg")
        assert same(x, wanted(ranks, "float32", 70_000, "avg"))
        x = given(session.rank, "int8", 5)
        group.broadcast(tensor_input(x), 1 % len(ranks))
        assert same(x, given(ranks[1 % len(ranks)], "int8", 5))
        group.barrier()
        group.close()
        done.append(ranks)
    return done


def test_groups_of_some_ranks(everywhere):
    everywhere.run(subgroups)


@pytest.mark.parametrize("values", [{"transport": "tcp"}, {"transport": "shm"},
                                    {"transport": "tcp", "placement": "ps"}],
                         ids=lambda values: " ".join(values.values()))
def test_groups_of_some_ranks_beside_a_helper(job, values):
    job(ranks=(2, 1), helpers=1, **values).run(subgroups)


@pytest.mark.parametrize("direct_sums", ["auto", "off"])
def test_ranks_of_one_machine(job, direct_sums):
    three = job(ranks=(3,), direct_sums=direct_sums)
    three.run(subgroups)
    three.run(sizes)
    for dtype in (*INTEGERS, *FLOATS):
        three.run(reductions, dtype)
    assert set(three.run(makes_direct_calls)) == {direct_sums == "auto"}


def makes_direct_calls():
    return bpsfast.counters()[f"rank_{bpsfast.rank()}_direct_calls"] > 0


def without_direct_calls():
    """The node has no memory for the members' channel: it carries out their calls."""
    group = whole()
    assert group._is_direct
    for n in (1, 30_000):
        x = given(group.rank, "float32", n)
        group.all_reduce(tensor_input(x), tensor_input(x))
        assert same(x, wanted(range(group.size), "float32", n, "sum")), n
    assert not group._is_direct
    group.close()


def test_ranks_in_another_order_than_their_places_let_their_node_sum(job):
    """The engine combines inputs by local rank, ranks by rank: direct sums would have other bits."""
    started = job(ranks=(2,), local_ranks={0: 1, 1: 0})
    started.run(without_direct_calls)
    assert set(started.run(makes_direct_calls)) == {False}


def is_crowded():
    return process.current().port._make_channel.keywords["is_crowded"]


def test_ranks_that_share_cpus_do_not_spin(job):
    n = (os.cpu_count() or 1) + 1
    assert job(ranks=(n,)).run(is_crowded) == [True] * n
    assert job(ranks=(1,)).run(is_crowded) == [False]


def test_direct_sums_beside_a_helper(job):
    """The memory of their channels is never the helper's."""
    job(ranks=(3,), helpers=1, transport="tcp", placement="ps", direct_sums="auto").run(subgroups)


def test_other_direct_calls_are_refused_on_all_members(job):
    job(ranks=(3,), direct_sums="auto").run(different)


def different():
    group = whole()
    x = np.ones(4 + group.rank // max(1, group.size - 1), np.float32)
    with pytest.raises(MismatchError, match=r"ranks? 0.*: all_reduce sum float32 \(4,\); rank .*\(5,\)") as first:
        group.all_reduce(tensor_input(x), tensor_input(x))
    with pytest.raises(MismatchError) as second:
        group.barrier()
    assert second.value is first.value
    group.close()
    other = whole()
    x = np.full(4, float(group.rank))
    with pytest.raises(MismatchError, match=r"barrier"):
        if group.rank == 0:
            other.barrier()
        else:
            other.broadcast(tensor_input(x), 0)
    other.close()


def test_members_that_call_different_things_are_all_told_so(job):
    for ranks in ((2,), (2, 1)):
        job(ranks=ranks).run(different)


def different_beside_fingerprints():
    """What differs goes through a pipe like that of the fingerprints, on some members only."""
    group = whole()
    group.barrier()
    x = np.arange(10, dtype=np.int64)
    with pytest.raises(MismatchError, match=r"rank 0: call 2: all_reduce band int64 \(10,\); ranks? 1.*: .*barrier"):
        if group.rank == 0:
            group.all_reduce(tensor_input(x), tensor_input(x), "band")
        else:
            group.barrier()
    group.close()


def test_who_called_what_is_found_out_beside_sums_like_fingerprints(two, three):
    two.run(different_beside_fingerprints)
    three.run(different_beside_fingerprints)


def large_pages():
    """Strips shorter than a page, as where pages are large: a pipe has then fewer partitions than strips."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_stream, "TINY", ChunkSize("tiny", 256, 32))
        patch.setattr(chunk_stream, "SMALL", ChunkSize("small", 1024, 32))
        group = whole()
        patch.setattr(group, "_is_direct", False)
        patch.setattr(group, "_sizes", (ChunkSize("wide", 2048, 32), chunk_stream.SMALL, chunk_stream.TINY))
        for n in (1, 300, 700, 30_000):
            x = given(group.rank, "float32", n)
            group.all_reduce(tensor_input(x), tensor_input(x))
            assert same(x, wanted(range(group.size), "float32", n, "sum")), n
        assert {each.unit.n_parts for each in group._streams.values()} == {2, 8, 16, 32}
        group.close()


def test_pipes_of_fewer_partitions_than_strips(two, three):
    two.run(large_pages)
    three.run(large_pages)


def closed_under_way():
    session = process.current()
    group = whole()
    group.barrier()
    errors = []

    def call():
        try:
            group.barrier()
        except ClosedError as exc:
            errors.append(str(exc))

    if session.rank == 0:
        callers = [threading.Thread(target=call) for _ in range(2)]
        for caller in callers:
            caller.start()
        while not group._count.is_inside:
            os.sched_yield()
        group.close()
        for caller in callers:
            caller.join(20)
        assert len(errors) == 2 and "was closed while a call was under way" in errors[0], errors
        assert "cannot be used any more" in errors[1]
    session.barrier()
    other = whole()
    other.barrier()
    other.close()


def test_a_call_that_waits_ends_when_the_group_is_closed(two):
    two.run(closed_under_way)


def closed_beside_a_look():
    """A thread that only looks whether a call is under way holds the lock while another one closes the group."""
    group = whole()
    group.barrier()
    looks, goes_on = threading.Event(), threading.Event()

    def look():
        group._lock.acquire()
        looks.set()
        goes_on.wait(20)
        group._release()

    looker = threading.Thread(target=look)
    looker.start()
    assert looks.wait(20)
    channel = group._machine_channel
    group.close()
    was_open = group._machine_channel is channel is not None
    goes_on.set()
    looker.join(20)
    return was_open, group._machine_channel


def test_a_group_that_is_closed_beside_a_look_is_closed_after_it(job):
    assert job(ranks=(2,), direct_sums="auto").run(closed_beside_a_look) == [(True, None)] * 2


def forked():
    group = whole()
    group.barrier()
    with group._lock:  # as of a thread that a fork has not
        child = os.fork()
        if child == 0:
            try:
                group.barrier()
            except ClosedError:
                group.close()
                os._exit(7)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    group.barrier()
    group.close()


def test_a_fork_is_refused_at_once_and_takes_nothing_away(two):
    two.run(forked)


def sent():
    """Return what this machine's node has written to others so far, in bytes."""
    process.current().barrier()  # whatever was asked for before is over, on all
    return sum(value for name, value in bpsfast.counters().items() if name.startswith("wire_") and
               name.endswith("_bytes_sent"))


def traffic(ranks, n):
    """Return the bytes that each rank's node writes for one sum of *n* floats among *ranks*, once all is declared."""
    session = process.current()
    group = make_group(session, ranks) if session.rank in ranks else None
    x = given(session.rank, "float32", n)
    moved = []
    for _ in range(2):
        before = sent()
        session.barrier()  # all have looked
        if group is not None:
            out = np.empty_like(x)
            group.all_reduce(tensor_input(x), tensor_input(out))
            assert same(out, wanted(ranks, "float32", n, "sum"))
        moved.append(sent() - before)
    if group is not None:
        group.close()
    return moved


def test_sums_of_one_machines_ranks_touch_no_wire_and_those_of_two_do(job):
    three_nodes = job(ranks=(2, 2, 1), helpers=1, transport="tcp")
    n = 500_000
    assert three_nodes.run(traffic, (0, 1), n) == [[0, 0]] * 5, "ranks of node 0"
    assert three_nodes.run(traffic, (4,), n) == [[0, 0]] * 5
    moved = three_nodes.run(traffic, (0, 2), n)
    assert all(4 * n < each < 4 * n * 1.1 for rank in (0, 2) for each in moved[rank]), moved
    assert moved[4] == [0, 0], "no rank of node 2 is a member"
    assert moved[0] == moved[1] and moved[2] == moved[3], "one node each"


def missing():
    """Rank 1 of ranks 1 and 2 of the first node waits for rank 2, which comes late; rank 0 is nobody's business."""
    session = process.current()
    ranks = (1, 2)
    if session.rank in ranks:
        group = make_group(session, ranks, timeout_s=30.0)
        group.barrier()
        if session.rank == 1:
            with group.within(1.0), pytest.raises(StallError, match=r"missing: rank 2[^;]*: has not pushed$"):
                group.barrier()
    session.barrier()


def test_of_a_groups_members_the_right_one_is_missing(job):
    job(ranks=(3, 1)).run(missing)


def without_one_who_left():
    """Ranks 0 and 1 go on after rank 2 has left the job in good order, also while one waits for the other."""
    session = process.current()
    ranks = (0, 1)
    if session.rank == 2:
        bpsfast.shutdown()
        return 0
    group = make_group(session, ranks, timeout_s=20.0)
    group.barrier()
    if session.rank == 1:
        time.sleep(2.0)  # meanwhile rank 0 asks, twice a second, whether it waits in vain
    x = given(session.rank, "int32", 10)
    group.all_reduce(tensor_input(x), tensor_input(x))
    group.close()
    return int(same(x, wanted(ranks, "int32", 10, "sum")))


def test_a_rank_that_has_left_ends_only_what_it_is_a_member_of(job):
    left = job(ranks=(2, 1))
    assert left.run(without_one_who_left) == [1, 1, 0]


def bad_arguments():
    session = process.current()
    group = whole()
    x, y = np.ones(3, np.float32), np.ones(4, np.float32)
    with pytest.raises(ConfigError, match="12 bytes of input for 16 bytes of output"):
        group.all_reduce(tensor_input(x), tensor_input(y))
    with pytest.raises(UnsupportedError, match="cannot combine by 'median'; it can by avg, sum"):
        group.all_reduce(tensor_input(x), tensor_input(x), "median")
    with pytest.raises(ConfigError, match="root 9, but group"):
        group.broadcast(tensor_input(x), 9)
    with pytest.raises(ConfigError, match="1 tensors for the 2 members"):
        group.all_gather(tensor_input(x), [tensor_input(x)])
    with pytest.raises(ConfigError, match=r"ranks \(0, 0\) are not different ranks of a job of 2"):
        make_group(session, [0, 0])
    with pytest.raises(ConfigError, match="is none of them"):
        make_group(session, [1 - session.rank])
    group.barrier()  # nothing was begun
    group.close()
    group.close()
    with pytest.raises(ClosedError, match="is closed"):
        group.barrier()


def test_bad_arguments_change_nothing(job):
    job(ranks=(2,)).run(bad_arguments)


def late():
    session = process.current()
    group = make_group(session, range(session.size), timeout_s=1.0)
    if session.rank == 0:
        with pytest.raises(Exception, match=r"rank 1.*has not declared"):
            group.barrier()
        with pytest.raises(ClosedError, match=r"cannot be used any more: its call 1 \(barrier\)"):
            group.barrier()
    session.barrier()


def test_a_member_that_does_not_come_is_named(job):
    job(ranks=(2,)).run(late)
