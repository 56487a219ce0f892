"""Memory bound: how often bytes go through memory, and that its sums and passages move all of them."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bpsfast.bench import memory_bound
from bpsfast.orchestration.placement.partition import CACHED_NBYTES
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import FAR_NBYTES


def test_streams():
    assert memory_bound.streams("numpy", 2, 64 << 20) == 3
    assert memory_bound.streams("torch", 2, 1 << 20) == 11
    assert memory_bound.streams("torch", 2, 64 << 20) == memory_bound.streams("torch", 2, 4 << 20) == 6
    assert memory_bound.streams("in place", 2, 64 << 20) == 4


@pytest.mark.parametrize(("size", "nbytes"), [(1, 4096), (2, 4), (2, 1 << 20), (3, 100_004), (2, FAR_NBYTES)])
def test_ranks_sum_all_of_it_together_and_another_share_each_time(size, nbytes):
    memory = Segment(memory_bound.Sums.total_nbytes(size, nbytes))
    sums = [memory_bound.Sums(rank, size, nbytes, memory) for rank in range(size)]
    rng = np.random.default_rng(1)
    for each in sums[0].inputs:
        each[:] = rng.integers(-1000, 1000, each.size)
    for turn in (1, 2, 3):
        with ThreadPoolExecutor(size) as ranks:
            list(ranks.map(lambda each: each.run(), sums))
        result = sums[0].results[turn % 2]
        np.testing.assert_array_equal(result, sum(sums[0].inputs))
        result[:] = 0
    assert size == 1 or all(each.share(1) != each.share(2) for each in sums)


@pytest.mark.parametrize("nbytes", [4, 100_004, 3 << 20, FAR_NBYTES])
def test_private_memory_comes_back_as_the_share_that_was_summed(nbytes):
    values = np.arange(1, nbytes // 4 + 1, dtype=np.float32)
    for size in (1, 2):
        passage = memory_bound.Passage(size, nbytes)
        passage.private[:] = values
        passage.run()
        for begin in range(0, values.size, CACHED_NBYTES // 4):
            piece = slice(begin, begin + CACHED_NBYTES // 4)
            n = -(-values[piece].size // size)
            np.testing.assert_array_equal(passage.private[piece][:n], values[piece][:n])
            assert not passage.private[piece][n:].any()  # the other rank's
