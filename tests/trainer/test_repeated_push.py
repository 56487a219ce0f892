"""The short way of a repeated push_pull gives what the general way gives, and steps aside where something differs."""
from __future__ import annotations

import msgspec
import numpy as np
import pytest

import bpsfast
from bpsfast.trainer import process
from bpsfast.trainer.handle import repeated_pushes


@pytest.fixture(scope="module")
def ranks(shared_job):
    return shared_job(ranks=(2,), direct_sums="off")


def push_many(name):
    x = bpsfast.empty(100, np.float32)
    found = []
    for i in range(5):
        x[:] = i + bpsfast.rank()
        result = bpsfast.push_pull(x, average=False, name=name)
        assert not result.flags.writeable and result.shape == (100,)
        found.append(float(result[99]))
    return found, name in process.current().extension(repeated_pushes)


def test_repeated_pushes_are_summed(ranks):
    assert ranks.run(push_many, "many") == [([1.0, 3.0, 5.0, 7.0, 9.0], True)] * 2


def result_lives_one_more_round():
    x = bpsfast.empty(10, np.int64)
    views = []
    for i in range(3):
        x[:] = i
        views.append(bpsfast.push_pull(x, average=False, name="lives"))
        if i:
            assert int(views[i - 1][0]) == 2 * (i - 1)
    return views[2].base is not None and int(views[0][0]) == int(views[2][0]) == 4


def test_a_result_is_valid_until_the_second_next_push(ranks):
    assert ranks.run(result_lives_one_more_round) == [True, True]


def other_memory_and_arguments():
    x = bpsfast.empty(16, np.float32)
    x[:] = 1
    bpsfast.push_pull(x, name="other")
    private = bpsfast.push_pull(np.full(16, 2, np.float32), name="other")
    out = np.zeros(16, np.float32)
    bpsfast.push_pull(x, name="other", out=out)
    errors = []
    for y, average in ((x.reshape(4, 4), True), (x.view(np.int32), True), (x, False), (x[:8], True)):
        try:
            bpsfast.push_pull(y, average=average, name="other")
        except bpsfast.BpsError as exc:
            errors.append(type(exc).__name__)
    try:
        bpsfast.push_pull(np.repeat(x, 2)[::2], name="other")
    except bpsfast.BpsError as exc:
        errors.append(type(exc).__name__)
    again = bpsfast.push_pull(x, name="other")
    return private.tolist() == [2] * 16 and private.flags.writeable, out.tolist() == again.tolist() == [1] * 16, errors


def test_what_differs_goes_the_general_way(ranks):
    expected = (True, True, ["MismatchError"] * 4 + ["UnsupportedError"])
    assert ranks.run(other_memory_and_arguments) == [expected, expected]


def second_push_in_flight():
    x = bpsfast.empty(8, np.float32)
    bpsfast.push_pull(x, name="busy")
    handle = bpsfast.push_pull_async(x, name="busy")
    try:
        bpsfast.push_pull(x, name="busy")
    except bpsfast.BusyError:
        return bpsfast.synchronize(handle).shape
    return None


def test_a_second_push_in_flight_is_refused(ranks):
    assert ranks.run(second_push_in_flight) == [(8,), (8,)]


def late_rank():
    x = bpsfast.empty(8, np.float32)
    bpsfast.push_pull(x, name="late")
    if bpsfast.rank() == 0:
        return None
    session = process.current()
    session.settings = msgspec.structs.replace(session.settings, timeout_s=1.0)  # the first push may take its time
    try:
        bpsfast.push_pull(x, name="late")
    except bpsfast.StallError as exc:
        return str(exc)
    return ""


def test_a_missing_rank_is_named(job):
    for direct_sums in ("off", "auto"):
        texts = job(ranks=(2,), direct_sums=direct_sums).run(late_rank)
        assert texts[0] is None and "waited 1 s" in texts[1] and "rank" in texts[1]


def test_a_closed_session_refuses(job):
    started = job(ranks=(1,))
    started.run(push_many, "closed")
    assert started.run(close_and_push) == ["ClosedError"]
    started._attached = False


def close_and_push():
    x = bpsfast.empty(4, np.float32)
    bpsfast.push_pull(x, name="end")
    bpsfast.shutdown()
    try:
        bpsfast.push_pull(x, name="end")
    except bpsfast.BpsError as exc:
        return type(exc).__name__
    return None
