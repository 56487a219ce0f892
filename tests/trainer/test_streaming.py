"""Streamed units, on real ranks: sums, rounds that end after their copy, and what an error leaves."""
from __future__ import annotations

import signal

import msgspec
import numpy as np
import pytest

import bpsfast
from bpsfast.orchestration.errors import BusyError, ClosedError, StallError
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.trainer import process


@pytest.fixture
def one_node(shared_job):
    return shared_job(ranks=(3,), transport="auto", direct_sums="off")


def same_name_in_two_threads():
    """The second thread must not get a round ahead of the first, whose result is still being copied out."""
    x = np.full(8_000_000, bpsfast.rank() + 1, "f4")
    bpsfast.push_pull(x, False, "two threads")
    unit, seen = process.current().tensors.unit("two threads"), []
    finish = unit.finish

    def watched(round):
        seen.append((unit.in_flight, bool((x == 6).all())))
        finish(round)

    unit.finish = watched
    bpsfast.push_pull(x, False, "two threads", out=x)
    return seen, unit.in_flight


def test_a_round_ends_only_once_its_result_was_copied_out(one_node):
    assert one_node.run(same_name_in_two_threads) == [([(True, True)], False)] * 3


def streamed():
    """Sums of many partitions from and to private memory, beside an asynchronous push of the same name."""
    generator = np.random.default_rng(bpsfast.rank())
    wrong = []
    for step in range(4):
        x = generator.integers(-100, 100, 5_000_001).astype("f4")
        kept = x.copy()
        if step == 2:
            y = bpsfast.synchronize(bpsfast.push_pull_async(x, False, "streamed"))
        else:
            y = bpsfast.push_pull(x, False, "streamed", out=x if step == 3 else None)
        wrong.append((step, kept, y.copy(), x is y or bool((x == kept).all())))
    return wrong


def test_a_large_private_tensor_is_streamed_through_a_small_window(one_node):
    for rounds in zip(*one_node.run(streamed)):
        expected = sum(kept for _, kept, _, _ in rounds)
        for _, _, y, input_intact in rounds:
            assert (y == expected).all() and input_intact


def overlapping():
    """What is written begins inside what is read: nothing of it may be written before all was read."""
    wrong = []
    for shift in (1, 300_000):
        x = np.arange(5_000_000 + shift, dtype="i4")
        kept = x[:5_000_000].copy()
        bpsfast.push_pull(x[:5_000_000], False, f"shifted by {shift}", out=x[shift:])
        wrong.append(int((x[shift:] != kept * 3).sum()))
    return wrong


def test_an_output_that_begins_inside_its_input(one_node):
    assert one_node.run(overlapping) == [[0, 0]] * 3


class Rang(Exception):
    """What a signal handler raises."""


def interrupted(shared):
    """A signal ends the only rank that waits for the other: the next push says so, and does not wait for the round."""
    x = bpsfast.empty((5_000_000,)) if shared else np.empty(5_000_000, "f4")
    x[:] = 1
    bpsfast.push_pull(x, False, "interrupted")
    if bpsfast.rank():
        return None

    def ring(*_):
        raise Rang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Rang):
            bpsfast.push_pull(x, False, "interrupted", out=None if shared else x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(BusyError, match=r"its last round ended with an error in the call that pushed it.*\(Rang\(\)\)"):
        bpsfast.push_pull(x, False, "interrupted")
    return bool((x == 1).all())


@pytest.mark.parametrize("shared", [False, True])
def test_a_signal_ends_the_call(job, shared):
    assert job(ranks=(2,), direct_sums="off").run(interrupted, shared) == [True, None]


def retired():
    x = np.full(5_000_000, bpsfast.rank() + 1, "f4")
    bpsfast.push_pull(x, False, "retired")
    unit = process.current().tensors.unit("retired")
    unit.forget()
    with pytest.raises(ClosedError, match="'retired' was retired"):
        unit.stream(x.ctypes.data, x.ctypes.data, x.nbytes, 10)
    return bool((x == bpsfast.rank() + 1).all())


def test_what_was_retired_is_not_streamed(one_node):
    assert one_node.run(retired) == [True] * 3


def declared():
    """A name that was announced is cut as one that was not, and its pushes take the short way."""
    bpsfast.declare("declared", (5_000_000,), average=False)
    x = np.full(5_000_000, bpsfast.rank() + 1, "f4")
    for _ in range(2):
        bpsfast.push_pull(x, False, "declared", out=x)
    tensors = process.current().tensors
    spec = TensorSpec(name="declared", dtype="float32", shape=(5_000_000,), average=False)
    known = [tensors.knows(msgspec.structs.replace(spec, **change))
             for change in ({}, {"on_device": True}, {"average": True}, {"on_device": True, "average": True})]
    return tensors.unit("declared").n_parts, set(x.tolist()), known


def test_a_declared_tensor_is_streamed(one_node):
    assert one_node.run(declared) == [(39, {18.0}, [True, True, False, False])] * 3


def stream_alone():
    """Rank 0 sums in place what the other has pushed three partitions of: the rest of the input survives the error."""
    x = np.full(5_000_000, bpsfast.rank() + 1, "f4")
    bpsfast.push_pull(x, False, "streamed alone")
    session = process.current()
    unit = session.tensors.unit("streamed alone")
    assert unit.n_parts == 39
    if bpsfast.rank():
        unit.staging.array.view("f4")[:] = 2
        session.port.submit(unit.first_part, 3, unit.first_round + 1, unit.staging.segment, unit.staging.offset)
        return None
    with pytest.raises(StallError, match=r"rank 1 .*partition 3 of|partition 3 of .*rank 1"):
        unit.stream(x.ctypes.data, x.ctypes.data, x.nbytes, 0.5)
    with pytest.raises(BusyError, match=r"cannot be pushed again: its last round ended with an error .* waited 0\.5 s"):
        bpsfast.push_pull(x, False, "streamed alone")
    summed = 3 * unit.stride // 4
    return bool((x[:summed] == 3).all() and (x[summed:] == 1).all())


def test_a_stall_leaves_what_is_not_summed_as_it_was(job):
    started = job(ranks=(2,), direct_sums="off")
    assert started.run(stream_alone) == [True, None]
