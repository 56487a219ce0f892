"""The vertex of a node, taken down: what cannot be closed keeps nothing else open."""
from __future__ import annotations

import os

import pytest

from bpsfast.node.vertex import Vertex
from bpsfast.settings import Settings


def test_memory_that_somebody_holds_keeps_nothing_else_open(no_leaks):
    before = len(os.listdir("/proc/self/fd"))
    vertex = Vertex(Settings(engine_threads=1, huge_pages="off"), lambda source, code: None)
    place, _ = vertex.regions.slots.allocate(5000)
    vertex.stop()
    with memoryview(vertex.regions.chunk(place.segment).segment):
        with pytest.raises(BufferError, match="live exports"):
            vertex.close()
        assert len(os.listdir("/proc/self/fd")) == before + 1  # the segment that is held
    vertex.regions.close()
