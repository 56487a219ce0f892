"""How fast a node copies: by how many threads, and that it is measured in no time."""
from __future__ import annotations

import os
import time

from bpsfast.base.settings import Settings
from bpsfast.node import capacity


def test_as_many_threads_as_the_engine_has():
    assert capacity.n_summing_threads(Settings(engine_threads=3)) == 3
    assert capacity.n_summing_threads(Settings()) == min(8, len(os.sched_getaffinity(0)))


def test_it_takes_no_time_and_counts_all_threads():
    begin = time.thread_time()
    one = capacity.measure_copy_rate(1)
    assert time.thread_time() - begin < 0.1, "a node's start must not wait for it"
    assert 50e6 < one < 1e12
    assert 2 < capacity.measure_copy_rate(32) / one < 512, "32 times as much, as far as other programs let it measure"
