"""Spread: on few CPUs, the thread that is woken for a second sum is sent to a CPU where none of its like sums."""
import os

import numpy as np
import pytest

from bpsfast.pyx.port import DONE
from tests.support import threads
from tests.support.engine_node import EngineNode


@pytest.fixture
def cpus():
    """Two CPUs, all that the calling thread and those it starts may use."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs 2 CPUs: with one there is nothing to choose")
    chosen = set(sorted(before)[:2])
    os.sched_setaffinity(0, chosen)
    yield sorted(chosen)
    os.sched_setaffinity(0, before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("awake_us", [0, 50])
def test_a_second_sum_gets_a_cpu_of_its_own(cpus, awake_us):
    before = threads.ids()
    v = EngineNode(n_parts=2, n_threads=2, awake_us=awake_us)
    try:
        first, second = engine_threads = sorted(threads.ids() - before)
        for part in range(2):
            v.own(part)
        v.commit()
        for round in range(1, 200):  # in one of them the second thread sleeps; else it comes by itself
            for thread in engine_threads:  # where a kernel would put both that sees waiting ranks everywhere else
                os.sched_setaffinity(thread, {cpus[0]})
            v.input(0)[:] = v.input(1)[:] = round
            for port in v.ports:
                port.submit(0, 2, round, 0, 0)
            assert v.ports[0].wait(0, 2, round, 10) == DONE
            assert np.all(v.output(round) == 2 * round)
            if {cpus[0]} != os.sched_getaffinity(first) or {cpus[0]} != os.sched_getaffinity(second):
                return
        pytest.fail("no thread was sent away from the CPU of the other")
    finally:
        v.close()


def test_more_cpus_than_threads_are_left_to_the_kernel(cpus):
    before = threads.ids()
    v = EngineNode(n_parts=2, n_threads=1)
    try:
        (thread,) = threads.ids() - before
        os.sched_setaffinity(thread, {cpus[0]})
        for part in range(2):
            v.own(part)
        v.commit()
        for port in v.ports:
            port.submit(0, 2, 1, 0, 0)
        assert v.ports[0].wait(0, 2, 1, 10) == DONE
        assert os.sched_getaffinity(thread) == {cpus[0]}
    finally:
        v.close()
