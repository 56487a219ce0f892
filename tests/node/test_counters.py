"""Counters: flat, integers, and the process's own memory apart from segments."""
from __future__ import annotations

from bpsfast.base.settings import Settings
from bpsfast.node.runtime import NodeRuntime, resident_outside_segments
from bpsfast.pyx.pages import Segment


def test_all_counters_are_integers_under_flat_names():
    runtime = NodeRuntime(Settings(engine_threads=1), lambda source, code: None)
    runtime.regions.results.allocate(5000)
    found = runtime.flat_counters(7)
    assert all(type(value) is int for value in found.values())
    assert found["control_messages"] == 7 and found["registrations"] == 1
    assert found["memory_segments"] == found["memory_result"] == runtime.regions.nbytes
    assert {"engine_sums", "dispatch_partitions"} <= set(found)
    runtime.stop()
    runtime.close()


def test_segments_do_not_count_as_memory_of_the_process():
    before = resident_outside_segments()
    with Segment(64 << 20, huge=False):
        assert resident_outside_segments() - before < 32 << 20
