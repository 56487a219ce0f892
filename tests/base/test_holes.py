"""Tests the free list: no bytes are allocated twice, and freed neighbours join."""
from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bpsfast.base.free_list import FreeList

SIZE = 1000


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=60))
def test_runs_never_overlap_and_all_come_back(steps):
    holes, taken = FreeList(SIZE), []
    for gives, number in steps:
        if gives and taken:
            holes.give(*taken.pop(number % len(taken)))
        else:
            free = [True] * SIZE
            for begin, nbytes in taken:
                free[begin:begin + nbytes] = [False] * nbytes
            runs = "".join("x" if each else " " for each in free).split()
            assert holes.nbytes == sum(map(len, runs)) and holes.largest_nbytes == max(map(len, runs), default=0)
            offset = holes.take(number)
            assert (offset is None) == all(len(run) < number for run in runs)
            if offset is not None:
                assert all(free[offset:offset + number]) and offset + number <= SIZE
                taken.append((offset, number))
    for run in taken:
        holes.give(*run)
    assert holes.take(SIZE) == 0 and holes.nbytes == 0


def test_what_is_free_cannot_be_given_back():
    holes = FreeList(SIZE)
    assert holes.take(100) == 0
    for offset, nbytes in ((100, 1), (50, 51), (900, 200)):
        with pytest.raises(ValueError, match=f"bytes {offset} to {offset + nbytes} are freed"):
            holes.give(offset, nbytes)
    holes.give(0, 100)
    assert holes.largest_nbytes == SIZE


def test_nothing_has_no_holes():
    assert FreeList().take(1) is None and FreeList().nbytes == FreeList().largest_nbytes == 0
