"""push_pull on real ranks: values, memory, order, and every misuse."""
from __future__ import annotations

import os
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import bpsfast
from bpsfast.base.dtypes import NAMES, TABLE
from bpsfast.base.reference_sum import reduce
from bpsfast.trainer import process

pytestmark = pytest.mark.matrix

SHAPES = [(2, 1), "tcp"], [(2, 1), "shm"], [(3,), "auto"]


@pytest.fixture(params=SHAPES, ids=["tcp", "shm", "one-node"])
def ranks(request, shared_job):
    shape, transport = request.param
    started = shared_job(ranks=shape, transport=transport)
    started.shape = shape
    return started


@pytest.fixture
def pair(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def sum_of(name, shape, average, seed):
    """Return what this rank pushed and what came back."""
    generator = np.random.default_rng([seed, bpsfast.rank()])
    x = generator.integers(-100, 100, shape).astype(TABLE[name].numpy)
    return x, bpsfast.push_pull(x, average, f"{name} {shape} {average} {seed}")


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_sums_of_every_dtype(ranks, name, average):
    results = ranks.run(sum_of, name, (33, 5), average, 1)
    inputs = [x for x, _ in results]
    of_node = iter(inputs)
    expected = reduce([[next(of_node) for _ in range(n)] for n in ranks.shape], average=average)
    for _, y in results:
        assert y.dtype == inputs[0].dtype and y.shape == (33, 5) and y.flags.writeable
        assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (4, 0), (1 << 20,), (3_000_001,)])
def test_any_shape(ranks, shape):
    results = ranks.run(sum_of, "float32", shape, False, 2)
    for _, y in results:
        assert isinstance(y, np.ndarray) and y.shape == shape
        assert (y == sum(x for x, _ in results)).all()


def many_rounds(n):
    x = bpsfast.empty(70_000, "f4")
    y = np.empty(5000, "i8")
    for step in range(n):
        x[:] = step + bpsfast.rank()
        view = bpsfast.push_pull(x, False, "in the segment")
        y[:] = step * bpsfast.rank()
        out = bpsfast.push_pull(y, False, "outside", out=y)
        if out is not y or view.flags.writeable or (view != 3 * step + 3).any() or (y != 3 * step).any():
            return step
    return None


def test_many_rounds_with_views_and_out(ranks):
    assert ranks.run(many_rounds, 50) == [None] * 3


def views_last():
    x = bpsfast.empty((1000, 4), "f4")
    views = []
    for step in range(2):
        x[:] = step + 1
        views.append(bpsfast.push_pull(x, True, "views"))
    kept = [float(view[3, 3]) for view in views]
    inside = process.current().memory.locate(x.ctypes.data, x.nbytes) is not None
    return kept, inside, views[0].base is not None


def test_a_view_lives_until_the_second_next_push(ranks):
    for kept, inside, is_view in ranks.run(views_last):
        assert kept == [1, 2] and inside and is_view


def from_threads():
    results = {}

    def work(number):
        for _ in range(20):
            results[number] = float(bpsfast.push_pull(np.full(5000, number, "f4"), False, f"thread {number}")[0])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads(ranks):
    assert ranks.run(from_threads) == [{0: 0, 1: 3, 2: 6, 3: 9}] * 3


def waited_elsewhere():
    handle = bpsfast.push_pull_async(np.full(100, 2.0), True, "elsewhere")
    found = []
    threads = [threading.Thread(target=lambda: found.append(handle.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(found), all(each is found[0] for each in found), float(found[0][0])


def test_a_handle_may_be_waited_for_in_any_thread(pair):
    assert pair.run(waited_elsewhere) == [(3, True, 2.0)] * 3


def polls():
    handle = bpsfast.push_pull_async(np.ones(10), True, "polled")
    deadline = time.monotonic() + 20
    while not bpsfast.poll(handle) and time.monotonic() < deadline:
        os.sched_yield()
    return bpsfast.poll(handle), float(bpsfast.synchronize(handle)[0]), float(bpsfast.synchronize(handle)[0])


def test_poll(pair):
    assert pair.run(polls) == [(True, 1.0, 1.0)] * 3


def dlpack():
    import torch

    tensor = torch.full((4,), float(bpsfast.rank()), dtype=torch.bfloat16)
    fresh = bpsfast.push_pull(tensor, False, "dlpack")
    same = bpsfast.push_pull(tensor, False, "dlpack", out=tensor)
    return str(fresh.dtype), fresh.astype("f4").tolist(), same.tolist()


def test_torch_tensors_through_dlpack(pair):
    assert pair.run(dlpack) == [("bfloat16", [3.0] * 4, [3.0] * 4)] * 3


def unnamed():
    first, second = bpsfast.push_pull(np.ones(3)), bpsfast.push_pull(np.full(4, 2.0))
    return first.tolist(), second.tolist()


def test_names_may_be_left_out(pair):
    assert pair.run(unnamed) == [([1, 1, 1], [2, 2, 2, 2])] * 3


def test_ranks_import_neither_numba_nor_a_framework(job):
    started = job(ranks=(1,))
    assert [names for names in started.run(sum_and_imports)] == [[]]


def many_unnamed():
    import warnings

    from bpsfast.trainer import handle

    handle._MANY_UNNAMED = int(process.current().tensors.unnamed("auto").split(".")[1]) + 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            bpsfast.push_pull(np.ones(3))
    return [str(each.message).split(":")[0].split(" ", 1)[1] for each in caught]


def test_many_unnamed_pushes_are_warned_of(pair):
    assert pair.run(many_unnamed) == [["push_pulls without a name"]] * 3


def sum_and_imports():
    bpsfast.push_pull(np.ones(3), name="x")
    # this module is imported by pytest's collection elsewhere; here only by the rank
    return [name for name in ("numba", "torch", "scipy") if name in sys.modules]


def large():
    x = bpsfast.empty(((1 << 31) + 4096,), np.uint8)
    x[-4096:] = bpsfast.rank() + 1
    y = bpsfast.push_pull(x, False, "large")
    return y.shape == x.shape, bool((y[-4096:] == 3).all()), bool((y[-8192:-4096] == 0).all())


@pytest.mark.thorough
@pytest.mark.slow
def test_more_than_two_gibibytes(job):
    assert job(ranks=(2,), timeout_s=100).run(large, timeout_s=110) == [(True, True, True)] * 2


# -- misuse --------------------------------------------------------------------------------------------------------


def busy():
    handle = bpsfast.push_pull_async(np.ones(3), True, "busy")
    try:
        bpsfast.push_pull_async(np.ones(3), True, "busy")
    except bpsfast.BusyError as exc:
        return float(handle.wait()[0]), "busy" in str(exc)
    return None


def test_the_same_name_twice_in_flight(pair):
    assert pair.run(busy) == [(1.0, True)] * 3
    assert pair.run(busy) == [(1.0, True)] * 3


def refused(kind):
    good = np.ones(4, "f4")
    bad = {"strides": lambda: bpsfast.push_pull(np.ones((4, 4), "f4").T, name="x"),
           "uint16": lambda: bpsfast.push_pull(np.ones(4, "u2"), name="x"),
           "out read-only": lambda: bpsfast.push_pull(good, name="x", out=bytes(16)),
           "out shape": lambda: bpsfast.push_pull(good, name="x", out=np.ones(5, "f4")),
           "out dtype": lambda: bpsfast.push_pull(good, name="x", out=np.ones(4, "f8"))}
    return bad[kind]()


@pytest.mark.parametrize(("kind", "error", "text"), [
    ("strides", "UnsupportedError", "np.ascontiguousarray"), ("uint16", "UnsupportedError", "uint16"),
    ("out read-only", "UnsupportedError", "read-only"), ("out shape", "MismatchError", r"(5,)"),
    ("out dtype", "MismatchError", "float64"),
])
def test_what_is_refused(pair, kind, error, text):
    for outcome in pair.attempt(refused, kind):
        assert outcome.error == error and text in outcome.text


def lonely():
    if bpsfast.rank() == 2:
        return None
    return bpsfast.synchronize(bpsfast.push_pull_async(np.ones(4), False, "stalled"), timeout_s=0.5)


def everybody():
    return bpsfast.push_pull(np.ones(4), False, "stalled").tolist()


def test_a_stall_names_who_is_missing(job):
    started = job(ranks=(2, 1), transport="tcp")
    started.run(everybody)
    outcomes = started.attempt(lonely)
    assert [outcome.error for outcome in outcomes] == ["StallError", "StallError", ""]
    for outcome in outcomes[:2]:
        assert "rank 2" in outcome.text and "stalled" in outcome.text and "0.5 s" in outcome.text
    started.kill()


def test_without_a_session():
    with pytest.raises(bpsfast.ClosedError, match=r"init\(\)"):
        bpsfast.push_pull(np.ones(3))


def bf16_rounding():
    x = np.full(3, 1 + bpsfast.rank() / 128, ml_dtypes.bfloat16)
    return bpsfast.push_pull(x, False, "bf16").astype("f4").tolist()


def test_bfloat16_is_summed_in_float32(shared_job):
    assert shared_job(ranks=(3,), transport="auto").run(bf16_rounding) == [[3.03125] * 3] * 3
