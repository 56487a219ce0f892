"""The sliding window: which of its places each partition goes through, and what a round's chunks say."""
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bpsfast.trainer.chunk_descriptors import SlidingWindow, is_worth, n_at_once
from bpsfast.trainer.input_memory import Region

WINDOW, SEGMENT, OFFSET, FIRST = 1 << 40, 7, 8192, 100


def sliding(n_parts, at_once, stride, nbytes):
    unit = SimpleNamespace(n_parts=n_parts, stride=stride, nbytes=nbytes, first_part=FIRST,
                           result_address=lambda parity, at: (parity + 1 << 32) + at)
    return SlidingWindow(unit, Region(np.zeros(0, np.uint8), SEGMENT, OFFSET, WINDOW), at_once)


@given(n_parts=st.integers(1, 40), at_once=st.integers(1, 9), last=st.integers(1, 4096),
       round=st.integers(0, 2**32 - 1))
def test_partitions_take_turns_in_the_window(n_parts, at_once, last, round):
    nbytes = (n_parts - 1) * 4096 + last
    chunks = sliding(n_parts, at_once, 4096, nbytes).chunks(1 << 20, 3 << 20, round)
    at = 4096 * np.arange(n_parts)
    assert chunks["nbytes"].tolist() == [4096] * (n_parts - 1) + [last]
    assert (chunks["source"] == (1 << 20) + at).all() and (chunks["destination"] == (3 << 20) + at).all()
    assert (chunks["result"] == ((round & 1) + 1 << 32) + at).all() and (chunks["round"] == round).all()
    assert chunks["part"].tolist() == list(range(FIRST, FIRST + n_parts)) and (chunks["segment"] == SEGMENT).all()
    places = chunks["staging"] - WINDOW
    assert (places == chunks["offset"] - OFFSET).all() and (places < at_once * 4096).all()
    assert (chunks["flags"] == 0).all()
    for first in range(max(1, n_parts - at_once + 1)):  # of as many as are on their way at once no two share a place
        assert len(set(places[first:first + at_once].tolist())) == min(at_once, n_parts)


def test_the_same_memory_in_each_round():
    window = sliding(4, 2, 4096, 4 * 4096)
    first = window.chunks(0, 0, 1)["result"].copy()
    second = window.chunks(0, 1 << 20, 2)
    assert second["source"][0] == 0 and second["destination"][0] == 1 << 20
    assert (first != second["result"]).all() and (window.chunks(0, 0, 3)["result"] == first).all()


@pytest.mark.parametrize(("local_size", "at_once"), [(1, 4), (2, 4), (4, 4), (6, 6), (8, 8), (64, 8)])
def test_more_ranks_have_more_on_the_way(local_size, at_once):
    assert n_at_once(local_size) == at_once
    assert not is_worth(2 * at_once - 1, local_size) and is_worth(2 * at_once, local_size)
