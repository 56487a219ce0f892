"""Memory bound: its sums read and write all of an array."""
from __future__ import annotations

import numpy as np
import pytest

from bpsfast.bench.harness import memory_bound
from bpsfast.orchestration.placement.partition import CACHED_NBYTES


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("nbytes", [4, 100_004, CACHED_NBYTES, 3 * CACHED_NBYTES + 4])
def test_all_of_an_array_is_read_and_written(nbytes, past):
    rng = np.random.default_rng(1)
    source, target = rng.random(nbytes // 4).astype(np.float32), np.zeros(nbytes // 4, np.float32)
    sums = memory_bound.Sums(target, source, past)
    sums.window[:] = rng.random(sums.window.size)
    sums.run()
    np.testing.assert_array_equal(target, source + np.resize(sums.window, target.size))
    in_place = memory_bound.Sums(source, source, past)
    in_place.window[:] = sums.window
    in_place.run()
    np.testing.assert_array_equal(source, target)


def test_sums_are_stored_past_the_caches_if_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(memory_bound, "_kernel", lambda: lambda *call: asked.append(call[-1]))
    for past in (False, True):
        memory_bound.Sums(np.zeros(8, np.float32), np.zeros(8, np.float32), past).run()
    assert asked == [False, True]


def grow():
    memory = memory_bound.RankMemory()
    made = [memory.operation(*each) for each in (("memory of torch", 8), ("memory of numpy", 64 << 10),
                                                 ("memory of torch, past caches", 1 << 20), ("memory of numpy", 8))]
    for each in made:
        each.fill(True)
        each.run()
    return memory.private.nbytes, memory.inputs.nbytes


def test_rows_of_all_sizes_share_the_memory_of_the_largest(two):
    assert two.run(grow) == [(1 << 20, 64 << 10)] * 2
