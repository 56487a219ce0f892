"""Frames of rows as ranks write and read them: by hand, round trips, and what is no frame."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.base.dtypes import NAMES, TABLE
from bpsfast.orchestration.errors import ProtocolError
from bpsfast.orchestration.placement.partition import row_frame_nbytes
from bpsfast.trainer.sparse_table import RowFrames


def frames_of(n_rows, row_shape=(3,), dtype="float32", n_parts=1, frame_rows=None):
    dtype = TABLE[dtype].numpy
    frame_rows = frame_rows or -(-n_rows // n_parts)
    row_nbytes = int(np.prod(row_shape)) * dtype.itemsize
    stride = -(-row_frame_nbytes(frame_rows, row_nbytes) // 4096) * 4096
    return RowFrames(n_rows, row_shape, dtype, n_parts, frame_rows, stride)


def memory_of(frames):
    return np.full(frames.n_parts * frames.stride, 0xEE, np.uint8)


def test_a_frame_by_hand():
    frames = frames_of(10, (2,))
    memory = memory_of(frames)
    assert frames.write(memory, np.array([7, 2]), np.array([[1, 2], [3, 4]], np.float32)) == 64 + 16
    assert memory[:24].view(np.uint64).tolist() == [64 + 16 - 8, 2, 0]
    assert memory[24:32].view(np.uint32).tolist() == [2, 7]
    assert memory[64:80].view(np.float32).tolist() == [3, 4, 1, 2]


def test_rows_are_dealt_in_turn():
    frames = frames_of(10, (1,), "int32", n_parts=3)
    memory = memory_of(frames)
    frames.write(memory, np.arange(10), np.arange(10, dtype=np.int32)[:, None])
    for part in range(3):
        own = memory[part * frames.stride :]
        n = int(own[8:16].view(np.uint64)[0])
        assert own[24 : 24 + 4 * n].view(np.uint32).tolist() == list(range(n))
        assert own[64 : 64 + 4 * n].view(np.int32).tolist() == list(range(part, 10, 3))


@settings(max_examples=200, deadline=None)
@given(n_rows=st.integers(1, 60), n_parts=st.integers(1, 4), dtype=st.sampled_from(NAMES), data=st.data())
def test_what_is_written_is_read_with_equal_rows_added_in_their_order(n_rows, n_parts, dtype, data):
    n_parts = min(n_parts, n_rows)
    indices = np.array(data.draw(st.lists(st.integers(0, n_rows - 1), max_size=80)), np.int64)
    values = np.random.default_rng(len(indices)).integers(-100, 100, (len(indices), 2, 2))
    values = (values / 7 if TABLE[dtype].is_float else values).astype(TABLE[dtype].numpy)
    frames = frames_of(n_rows, (2, 2), dtype, n_parts)
    memory = memory_of(frames)
    nbytes = frames.write(memory, indices, values)
    found, sums = frames.read(memory)
    wide = TABLE[dtype].accumulator
    expected = {}
    for index, value in zip(indices.tolist(), values):
        expected[index] = expected[index] + value.astype(wide) if index in expected else value.astype(wide)
    assert found.tolist() == sorted(expected) and sums.dtype == values.dtype and sums.shape == (len(expected), 2, 2)
    assert all(sums[i].tobytes() == expected[index].astype(values.dtype).tobytes() for i, index in enumerate(found))
    assert nbytes == sum(8 + int(memory[part * frames.stride :][:8].view(np.uint64)[0]) for part in range(n_parts))
    assert frames.needed(memory) == 0


def test_one_row_many_times():
    frames = frames_of(5, (2,), "bfloat16")
    memory = memory_of(frames)
    frames.write(memory, np.full(1000, 3), np.ones((1000, 2), ml_dtypes.bfloat16))
    indices, values = frames.read(memory)
    assert indices.tolist() == [3]
    assert values.astype(float).tolist() == [[1000, 1000]], "adding in bfloat16 would end at 256"


def test_what_does_not_fit_says_how_much_it_is():
    frames = frames_of(20, (2,), n_parts=2, frame_rows=4)
    memory = memory_of(frames)
    indices = np.array([0, 2, 4, 6, 8, 10, 1, 3])
    assert frames.write(memory, indices, np.ones((8, 2), np.float32)) == 24 + row_frame_nbytes(2, 8)
    assert frames.needed(memory) == 6
    with pytest.raises(ProtocolError, match="partition 0 of 2"):
        frames.read(memory)


@pytest.mark.parametrize(("change", "text"), [
    (lambda head, indices: head.__setitem__(1, 5), "5 rows"),
    (lambda head, indices: head.__setitem__(0, 1 << 40), "bytes follow"),
    (lambda head, indices: head.__setitem__(2, 2), "flags 2"),
    (lambda head, indices: head.__setitem__(slice(None), (16, 11, 1)), "11 rows"),
    (lambda head, indices: indices.__setitem__(1, 0), "do not ascend below 10"),
    (lambda head, indices: indices.__setitem__(2, 10), "do not ascend below 10"),
])
def test_what_is_no_frame(change, text):
    frames = frames_of(10, (2,), frame_rows=4)
    memory = memory_of(frames)
    frames.write(memory, np.array([0, 4, 9]), np.ones((3, 2), np.float32))
    change(memory[:24].view(np.uint64), memory[24:36].view(np.uint32))
    with pytest.raises(ProtocolError, match=text):
        frames.needed(memory)
        frames.read(memory)
