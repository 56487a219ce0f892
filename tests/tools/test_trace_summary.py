"""Where the time of a step went: the sums are those of the records, and every cause is told from the others."""
from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bpsfast import trace
from bpsfast.tools.trace.summary import length, union, without
from bpsfast.trace import Origin, Part
from tests.support.trace_records import gather, job, record, send

_INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)).map(lambda t: (t[0], t[0] + t[1])), max_size=8)


@given(_INTERVALS, _INTERVALS)
def test_intervals_are_sets_of_moments(some, others):
    def moments(times):
        return {moment for begin, end in times for moment in range(begin, end)}

    assert moments(union(some)) == moments(some) and length(union(some)) == len(moments(some))
    left = without(union(some), union(others))
    assert moments(left) == moments(some) - moments(others) and length(left) == len(moments(left))


def test_a_wait_is_divided_by_what_happened_meanwhile(tmp_path):
    job(tmp_path)
    found = trace.summarise(trace.load(tmp_path))
    us = pytest.approx
    # rank 0 waits from 12 to 90: wire 20-50 and 65-90, credit 15-20 and 60-65, sum 50-60, inputs 12-15
    waiting = {cause: seconds * 2e6 for cause, seconds in found.waiting.items()}
    assert waiting == {"sums": us(10), "the wire": us(55), "credit or more urgent writes": us(10),
                       "a free summing thread": us(0), "inputs of others": us(3), "other": us(0)}
    assert (found.ranks, found.steps) == (2, 1)
    assert found.wait_s * 2e6 == us(78) and found.copy_s * 2e6 == us(10 + 5 + 1)
    assert found.step_s * 2e6 == us(95 + 1) and found.compute_s * 2e6 == us(2)
    assert found.tensors == {"weight": us(39e-6)}
    assert [(link.title, link.busy_s * 1e6, link.nbytes) for link in found.links] == [
        ("node 0 to node 1", us(30), 4096), ("node 1 to node 0", us(25), 4096)]
    assert [(node.title, node.busy_s * 1e6) for node in found.nodes] == [("node 1", us(10)), ("node 0", 0)]


def test_five_lines_say_it_in_words(tmp_path):
    job(tmp_path)
    assert trace.summarise(trace.load(tmp_path)).lines() == [
        "step: 0.048 ms (mean of 2 ranks and 1 steps): computing 0.001 ms (2%), copying 0.008 ms (17%), waiting 0.039 "
        "ms (81%)",
        "waiting for: the wire 0.0275 ms, sums 0.005 ms, credit or more urgent writes 0.005 ms, inputs of others "
        "0.0015 ms",
        "slowest: link node 0 to node 1 (0.03 ms a step for 0.0041 MB: 1.09 Gbit/s), sums on node 1 (0.01 ms a step "
        "for 0.00819 MB), tensor weight (waited for 0.039 ms a step)",
        "urgency: 0 priority inversions in 2 writes; a write waited never behind a less urgent one; the credit window "
        "is 0.0041 MB",
        "clocks: 4 processes on 1 clock"]


def test_a_direct_sum_is_input_and_wait(tmp_path):
    records = b"".join(record("direct", 100_000 * i, 100_000 * i + 30_000, round_=i + 1) for i in range(4))
    trace.write(tmp_path, "rank 0", records, {0: Part("w")}, Origin(node=0, rank=0))
    found = trace.summarise(trace.load(tmp_path))
    assert (found.steps, found.step_s, found.wait_s) == (3, pytest.approx(100e-6), pytest.approx(30e-6))


def test_steps_are_counted_from_input_to_input(tmp_path):
    """Three rounds, 100 us each but for the last, which is not whole: compute is what is neither copy nor wait."""
    records = b"".join(record("copy", 100_000 * i, 100_000 * i + 10_000, round_=i + 1)
                       + record("wait", 100_000 * i + 20_000, 100_000 * i + 50_000, round_=i + 1) for i in range(3))
    trace.write(tmp_path, "rank 0", records, {0: Part("w")}, Origin(node=0, rank=0))
    found = trace.summarise(trace.load(tmp_path))
    assert (found.steps, found.step_s, found.copy_s, found.wait_s) == (
        2, pytest.approx(1e-4), pytest.approx(1e-5), pytest.approx(3e-5))
    assert found.compute_s == pytest.approx(6e-5) and found.waiting["other"] == pytest.approx(3e-5)


def test_threads_that_wait_at_once_wait_once(tmp_path):
    records = (record("copy", 0, 10) + record("wait", 10, 100) + record("wait", 20, 120, part=1)
               + record("copy", 120, 130))
    trace.write(tmp_path, "rank 0", records, {}, Origin(node=0, rank=0))
    found = trace.summarise(trace.load(tmp_path))
    assert found.wait_s == pytest.approx(110e-9) and found.tensors == pytest.approx({"part 0": 90e-9, "part 1": 20e-9})


def test_a_name_that_is_not_printable_stays_on_its_line(tmp_path):
    trace.write(tmp_path, "rank 0", record("copy", 0, 10) + record("wait", 10, 100), {0: Part("a\nb")},
                Origin(node=0, rank=0))
    found = trace.summarise(trace.load(tmp_path))
    assert r"tensor a\nb (waited" in found.lines()[2] and list(found.tensors) == ["a\nb"]


def test_results_for_other_nodes_are_not_waited_for(tmp_path):
    parts = {0: Part("w", owner=0)}
    trace.write(tmp_path / "0", "node 0", record("wire", 0, 900, thread=1) + record("wire", 0, 300, thread=2), parts,
                Origin(node=0, peers={1: 1, 2: 2}))
    trace.write(tmp_path / "1", "rank 0", record("push", 0, 10, nbytes=1) + record("wait", 10, 1000), parts,
                Origin(node=2, rank=0))
    gather(tmp_path)
    assert trace.summarise(trace.load(tmp_path)).waiting["the wire"] == pytest.approx(290e-9)


def test_what_is_missing_is_said(tmp_path):
    trace.write(tmp_path, "node 0", b"", {}, Origin(node=0, full=True), [send(0, 1, 1)])
    step, waiting, slowest, urgency, clocks = trace.summarise(trace.load(tmp_path)).lines()
    assert "there is no trace of a rank" in step and waiting == "waiting for: nothing"
    assert "nothing was sent, summed or waited for" in slowest and "1 writes" in urgency
    assert "records dropped on node 0: set trace_capacity" in clocks
