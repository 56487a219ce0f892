"""Streamed units, on real ranks: sums, rounds that end after their copy, and inputs that survive an error."""
from __future__ import annotations

import numpy as np
import pytest

import bpsfast
from bpsfast.orchestration.errors import StallError
from bpsfast.trainer import current


@pytest.fixture
def one_node(shared_job):
    return shared_job(ranks=(3,), transport="auto")


def same_name_in_two_threads():
    """The second thread must not get a round ahead of the first, whose result is still being copied out."""
    x = np.full(8_000_000, bpsfast.rank() + 1, "f4")
    bpsfast.push_pull(x, False, "two threads")
    unit, seen = current.current().tensors.unit("two threads"), []
    deliver = unit.deliver

    def watched(*arguments):
        seen.append(unit.in_flight)
        deliver(*arguments)

    unit.deliver = watched
    bpsfast.push_pull(x, False, "two threads")
    return seen, unit.in_flight


def test_a_round_ends_only_once_its_result_was_copied_out(one_node):
    assert one_node.run(same_name_in_two_threads) == [([True], False)] * 3


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


def stream_alone():
    """Rank 0 sums in place what the others never push: the input must survive the error."""
    x = np.full(5_000_000, bpsfast.rank() + 1, "f4")
    bpsfast.push_pull(x, False, "streamed alone")
    kept = x.copy()
    if bpsfast.rank():
        return None
    unit = current.current().tensors.unit("streamed alone")
    with pytest.raises(StallError, match="rank"):
        unit.stream(x.ctypes.data, x.ctypes.data, x.nbytes, 0.5)
    return bool((x == kept).all())


def test_a_streamed_input_survives_a_stall(job):
    started = job(ranks=(2,))
    assert started.run(stream_alone) == [True, None]
