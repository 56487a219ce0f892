"""Clocks of several machines: shared ones, drifting ones, cloned machines, and what nobody knows."""
from __future__ import annotations

import pytest

from bpsfast import trace
from bpsfast.base.trace_file import Process
from bpsfast.orchestration.clock_offset import Point
from bpsfast.tools.trace.job_trace import align
from bpsfast.trace import Origin
from tests.support.trace_records import change, record


@pytest.fixture
def process(tmp_path):
    """Make a process that worked from 1000 to 2000 by its own clock."""

    def make(role: str, clock_id: str, node: int, rank: int = -1, clock: tuple[Point, ...] = ()) -> Process:
        path = trace.write(tmp_path, role, record("copy", 1000, 2000), origin=Origin(node=node, rank=rank, clock=clock))
        change(path, clock_id=clock_id)
        return trace.read(path)

    return make


def begins(processes: list[Process]) -> list[int]:
    clocks = align(processes)
    return [clock.shift(process.spans[0]).begin_ns for clock, process in zip(clocks.of, processes)]


def test_one_clock_needs_no_offset(process):
    job = [process("node 0", "a", 0, clock=(Point(0, 70, 20),)), process("node 1", "a", 1),
           process("rank 0", "a", 0, 0)]
    assert begins(job) == [1000, 1000, 1000]
    assert align(job)[1:] == (1, 0, [])


def test_ranks_have_their_nodes_clock_and_neighbours_share_the_better_estimate(process):
    job = [process("node 0", "a", 0, clock=(Point(1500, 70, 20),)),
           process("node 1", "b", 1, clock=(Point(1500, -500, 3),)),
           process("node 2", "a", 2, clock=(Point(1500, 60, 10),)),
           process("rank 0", "a", 0, 0), process("rank 1", "b", 1, 1)]
    assert begins(job) == [1060, 500, 1060, 1060, 500]
    assert (align(job).number, align(job).uncertainty_ns, align(job).unknown) == (2, 10, [])


def test_a_drifting_clock_is_followed(process):
    drifting = process("node 1", "b", 1, clock=(Point(0, 0, 1), Point(2000, 1000, 1)))
    assert begins([process("node 0", "a", 0, clock=(Point(0, 0, 1),)), drifting]) == [1000, 1500]
    assert align([drifting, process("node 0", "a", 0, clock=(Point(0, 0, 1),))]).uncertainty_ns >= 1


def test_clones_of_one_machine_are_not_taken_together(process):
    job = [process("node 0", "a", 0, clock=(Point(0, 0, 5),)), process("node 1", "a", 1, clock=(Point(0, 10**6, 8),)),
           process("rank 1", "a", 1, 1)]
    assert begins(job) == [1000, 10**6 + 1000, 10**6 + 1000]
    assert align(job).number == 2


def test_a_clock_of_which_nobody_knows_is_named(process):
    job = [process("node 0", "a", 0, clock=(Point(0, 5, 5),)), process("rank 3", "b", 1, 3)]
    assert begins(job) == [1005, 1000]
    assert align(job).unknown == ["rank 3"]
