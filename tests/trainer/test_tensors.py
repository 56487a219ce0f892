"""Names on real ranks: declared in any order, refused where ranks differ, pushes deferred until all know them."""
from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

import bpsfast
from bpsfast.orchestration.errors import MismatchError, StallError
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.trainer import process


@pytest.fixture(params=[[(2, 1), "tcp"], [(2, 1), "shm"], [(3,), "auto"]], ids=["tcp", "shm", "one-node"])
def ranks(request, shared_job):
    shape, transport = request.param
    return shared_job(ranks=shape, transport=transport)


@pytest.fixture
def pair(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def orders():
    names = [f"order {i}" for i in range(6)]
    if bpsfast.rank() % 2:
        names.reverse()
    handles = {name: bpsfast.push_pull_async(np.full(100, int(name[-1]), "f4"), True, name) for name in names}
    return [float(bpsfast.synchronize(handles[name])[0]) for name in sorted(names)]


def test_ranks_may_push_in_different_orders(ranks):
    assert ranks.run(orders) == [[0, 1, 2, 3, 4, 5]] * 3


def deferred_beside_a_wait():
    """Rank 0 waits for "known" while its first push of "new" is deferred; rank 1 waits for "new" before "known"."""
    one = np.ones(10, "f4")
    bpsfast.push_pull(one, True, "known")
    if bpsfast.rank() == 0:
        handle = bpsfast.push_pull_async(one, False, "new")
        bpsfast.push_pull(one, True, "known")
        return float(handle.wait()[0])
    total = bpsfast.push_pull(one, False, "new")
    bpsfast.push_pull(one, True, "known")
    return float(total[0])


def test_a_deferred_push_goes_out_beside_another_wait(ranks):
    assert ranks.run(deferred_beside_a_wait) == [3, 3, 3]


def deferred_beside(other):
    """Rank 0's first push of a name is deferred while it waits for what the others only do once they have its sum."""
    one, name = np.ones(10, "f4"), f"beside {other}"
    if bpsfast.rank() == 0:
        handle = bpsfast.push_pull_async(one, False, name)
        if other == "declaration":
            bpsfast.push_pull(one, False, f"{name} 2")
        elif other == "barrier":
            bpsfast.barrier()
        return float(handle.wait()[0])
    time.sleep(0.3)
    total = bpsfast.push_pull(one, False, name)
    if other == "declaration":
        bpsfast.push_pull(one, False, f"{name} 2")
    elif other == "barrier":
        bpsfast.barrier()
    return float(total[0])


@pytest.mark.parametrize("other", ["declaration", "barrier"])
def test_a_deferred_push_goes_out_beside_any_wait(ranks, other):
    assert ranks.run(deferred_beside, other) == [3, 3, 3]


def commit_read_by(reader, how):
    """Another request's wait reads the commit of a name whose push was deferred: the push goes out all the same."""
    name = f"read by {reader} {how}"
    handle = bpsfast.push_pull_async(np.ones(10, "f4"), False, name)
    session = process.current()
    deadline = time.monotonic() + 20
    while name not in session.tensors._units and time.monotonic() < deadline:
        bpsfast.counters() if reader == "stats" else bpsfast.empty(10)
        time.sleep(0.01)
    if how == "poll":
        while not bpsfast.poll(handle):
            assert time.monotonic() < deadline, "never done"
            time.sleep(0.01)
    return float(handle.wait(20)[0])


@pytest.mark.parametrize("how", ["poll", "wait"])
@pytest.mark.parametrize("reader", ["stats", "empty"])
def test_a_commit_that_another_request_reads_starts_the_push(ranks, reader, how):
    assert ranks.run(commit_read_by, reader, how) == [3, 3, 3]


def declared_before():
    bpsfast.declare("declared", (3, 2), np.int64, average=False)
    return bpsfast.push_pull(np.ones((3, 2), np.int64), False, "declared").tolist()


def test_declare(pair):
    assert pair.run(declared_before) == [[[3, 3]] * 3] * 3


def differently(field):
    bpsfast.push_pull(np.ones(3, "f4"), True, "once")
    x = {"shape": np.ones(4, "f4"), "dtype": np.ones(3, "f8"), "average": np.ones(3, "f4")}[field]
    bpsfast.push_pull(x, field != "average", "once")


@pytest.mark.parametrize("field", ["shape", "dtype", "average"])
def test_one_name_used_differently_on_one_rank(pair, field):
    for outcome in pair.attempt(differently, field):
        assert outcome.error == "MismatchError" and field in outcome.text and "once" in outcome.text


def declared_by_some(field):
    """Of what two of three ranks declare: what they do to it, and that they do, cannot be said otherwise later."""
    session = process.current()
    first = TensorSpec(name=f"some differ in {field}", dtype="float32", shape=(3,), average=False, op="max",
                       ranks=(0, 1))
    if session.rank < 2:
        for _ in range(2):
            session.tensors.declare([first])
        assert session.tensors.unit(first.name, 20.0).name == first.name
    session.barrier()
    if session.rank == 2:
        assert session.tensors.unit_nowait(first.name) is None, "nobody told this rank"
        return
    other = msgspec.structs.replace(first, **{field: {"op": "min", "ranks": ()}[field]})
    with pytest.raises(MismatchError, match=f"{field} of tensor 'some differ in {field}' differs"):
        session.tensors.declare([other])


@pytest.mark.parametrize("field", ["op", "ranks"])
def test_what_some_ranks_declared_stays_what_it_is(ranks, field):
    ranks.run(declared_by_some, field)


def alone():
    session = process.current()
    if session.rank == 0:
        session.tensors.declare([TensorSpec(name="of two", dtype="int8", shape=(1,), average=False, ranks=(0, 2))])
        with pytest.raises(StallError, match=r"for tensor 'of two' to be declared by ranks \(0, 2\).*rank 2") as raised:
            session.tensors.unit("of two", 0.5)
        assert "rank 1" not in str(raised.value)
    session.barrier()


def test_who_has_not_declared_what_is_of_some_ranks_is_named(pair):
    pair.run(alone)


def ranks_differ(field):
    odd = bpsfast.rank() == 1
    x = np.ones(4 if odd and field == "shape" else 3, "f8" if odd and field == "dtype" else "f4")
    return bpsfast.push_pull(x, not (odd and field == "average"), f"ranks differ in {field}")


@pytest.mark.parametrize("field", ["shape", "dtype", "average"])
def test_ranks_that_differ_all_get_the_error(pair, field):
    for outcome in pair.attempt(ranks_differ, field):
        assert outcome.error == "MismatchError" and field in outcome.text and "rank 1" in outcome.text


def test_a_name_the_ranks_differed_in_stays_refused(pair):
    pair.attempt(ranks_differ, "shape")
    for outcome in pair.attempt(ranks_differ, "shape"):
        assert outcome.error == "MismatchError" and "shape" in outcome.text
    assert pair.run(declared_before) == [[[3, 3]] * 3] * 3, "and the job goes on"


def undeclared():
    return bpsfast.synchronize(bpsfast.push_pull_async(np.ones(4), name="only here"), timeout_s=0.3)


def test_a_name_that_others_never_declare(job):
    started = job(ranks=(2,))
    started.begin(undeclared, only=(0,))
    [outcome] = started.outcomes(only=(0,))
    assert outcome.error == "StallError" and "only here" in outcome.text and "declared" in outcome.text
    started.kill()
