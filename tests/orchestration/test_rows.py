"""Tables in partitions: how rows are dealt, what a plan says of them, and what is refused."""
from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bpsfast.orchestration.errors import ConfigError, UnsupportedError
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.orchestration.placement.layout import lay_out
from bpsfast.orchestration.placement.partition import (
    nbytes_of,
    part_rows,
    plan_units,
    row_frame_nbytes,
    split_rows,
    values_offset,
)
from bpsfast.orchestration.placement.shares import Machine


def table(**fields):
    return TensorSpec(**{"name": "t", "dtype": "float32", "shape": (1000, 8), "op": "rows", "max_rows": 100, **fields})


@given(n_rows=st.integers(1, 1 << 40), max_rows=st.integers(1, 1 << 41), row_nbytes=st.integers(1, 4096))
def test_all_rows_have_a_partition_and_no_frame_more_than_its_partition(n_rows, max_rows, row_nbytes):
    n_parts, frame_rows = split_rows(n_rows, max_rows, row_nbytes, 4 << 20)
    most = part_rows(n_rows, n_parts, 0)
    assert 1 <= n_parts <= n_rows and 1 <= frame_rows <= most <= 1 << 32
    assert n_parts * frame_rows >= min(n_rows, max_rows)
    assert part_rows(n_rows, n_parts, n_parts - 1) in (most, most - 1)
    if max_rows >= n_rows:
        assert frame_rows == most, "a sum of all rows has room"
    if n_parts < 1000:
        assert sum(part_rows(n_rows, n_parts, i) for i in range(n_parts)) == n_rows


@pytest.mark.parametrize(("arguments", "n_parts", "frame_rows"), [
    ((0, 10, 4, 4 << 20), 0, 0),
    ((10, 100, 4, 4 << 20), 1, 10),
    ((10_000, 100, 4, 4 << 20), 1, 100 + 40 + 16),
    ((1 << 22, 40_000, 512, 4 << 20), 5, 8000 + 4 * 89 + 16),
    ((3, 3, 1 << 22, 1 << 20), 3, 1),
    ((1 << 34, 1, 4, 4 << 20), 4, 1 + 4 + 16),
])
def test_deals(arguments, n_parts, frame_rows):
    assert split_rows(*arguments) == (n_parts, frame_rows)


def test_the_bytes_of_frames():
    assert [values_offset(n) for n in (0, 1, 10, 11)] == [64, 64, 64, 128]
    assert row_frame_nbytes(11, 12) == 128 + 132


def test_a_plan_has_room_for_frames_and_not_for_the_table():
    spec = table(shape=(1 << 22, 128), max_rows=40_000)
    (unit,) = plan_units([spec], 0, 7, 4 << 20, 1 << 20, 4096)
    room = -(-row_frame_nbytes(unit.frame_rows, 512) // 4096) * 4096
    assert [(part.part, part.offset, part.nbytes) for part in unit.parts] == [
        (7 + i, i * room, room) for i in range(5)]
    assert (unit.nbytes, unit.stride, unit.members[0].shape) == (5 * room, room, (1 << 22, 128))
    assert unit.nbytes < 1.2 * 40_000 * 516


def test_frames_are_never_cut_finer():
    machines = [Machine(1.0, True), Machine(1.0, True), Machine(1.0, False)]
    (unit,) = lay_out([table(shape=(1 << 22, 128), max_rows=40_000)], machines, policy="optimal",
                      partition_nbytes=64 << 20, fusion_nbytes=1 << 20)
    assert len(unit.parts) == 2 and {part.nbytes for part in unit.parts} == {unit.stride}


def test_a_table_stands_beside_fused_tensors():
    small = [TensorSpec(name=name, dtype="float32", shape=(4,), group="g") for name in "ab"]
    units = plan_units([small[0], table(), small[1]], 0, 0, 4 << 20, 1 << 20)
    assert [[member.name for member in unit.members] for unit in units] == [["a", "b"], ["t"]]


@pytest.mark.parametrize(("fields", "kind", "text"), [
    ({"shape": ()}, UnsupportedError, r"has shape \(\)"), ({"shape": (5, 0)}, UnsupportedError, r"has shape \(5, 0\)"),
    ({"shape": (-1, 2)}, UnsupportedError, "negative"), ({"max_rows": 0}, ConfigError, "max_rows=0"),
    ({"group": "g"}, ConfigError, "fused with nothing"), ({"dtype": "float8"}, UnsupportedError, "float8"),
])
def test_what_is_no_table(fields, kind, text):
    with pytest.raises(kind, match=text):
        nbytes_of(table(**fields))
