"""The formulas of the layouts, how many helpers pay, and what is said at the start of a job."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.placement import forecast
from bpsfast.orchestration.placement.assignment import assign, step_time_s
from bpsfast.orchestration.placement.shares import Machine, optimal_shares


def job(n, k=0, worker=0.0, helper=None):
    return [Machine(True, worker)] * n + [Machine(False, worker if helper is None else helper)] * k


@pytest.mark.parametrize(("n", "k", "ring", "ps", "colocated", "optimal"), [
    (4, 1, 1.5, 4.0, 1.5, 1.333), (8, 2, 1.75, 4.0, 1.75, 1.474), (8, 8, 1.75, 1.0, 1.75, 1.0),
    (32, 16, 1.938, 2.0, 1.938, 1.319), (2, 1, 1.0, 2.0, 1.0, 1.0)])
def test_equal_links_give_the_published_table(n, k, ring, ps, colocated, optimal):
    machines = job(n, k)
    found = (forecast.ring_s(machines, 1.0), *(forecast.policy_s(machines, policy, 1.0)
                                               for policy in ("ps", "colocated", "optimal")))
    assert found == pytest.approx((ring, ps, colocated, optimal), abs=5.1e-4)
    assert forecast.policy_s(machines, "hash:djb2", 1.0) is None
    assert forecast.ps_s(job(n), 1.0) == float("inf")


def test_one_slow_worker_costs_a_ring_but_not_the_optimum():
    machines = [Machine(True, 10.0)] * 7 + [Machine(True, 2.5)]
    assert forecast.ring_s(machines, 1.0) == pytest.approx(0.7)
    assert forecast.colocated_s(machines, 1.0) == pytest.approx(0.4)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 7), st.integers(1, 7), st.lists(st.floats(0.5, 100), min_size=14, max_size=14))
def test_formulas_are_what_placements_of_small_partitions_come_to(n, k, rates):
    machines = [Machine(m < n, rates[m]) for m in range(n + k)]
    parts = [1000] * 4000
    for policy in ("ps", "colocated"):
        placed_s = step_time_s(zip(parts, assign(parts, machines, policy)), machines)
        assert placed_s == pytest.approx(forecast.policy_s(machines, policy, sum(parts)), rel=0.05)
        assert placed_s >= optimal_shares(machines, sum(parts)).time_s * (1 - 1e-9)


@pytest.mark.parametrize(("machines", "last"), [
    (job(4), 4), (job(8, 4), 8), (job(8, 12), 8), (job(2, 1), 0), (job(1, 1), 0),
    (job(8, 0, 25.0), 8), (job(8, 4, 100.0, 25.0), 32),
    ([Machine(True, 10.0)] * 7 + [Machine(True, 2.5), Machine(False, 10.0)], 0),
    ([Machine(True, 10.0)] * 4 + [Machine(False, 10.0, 5.0)], 8)])
def test_the_last_helper_that_pays(machines, last):
    assert forecast.last_helper_that_pays(machines) == last
    times = [optimal_shares(forecast.with_helpers(machines, k), 1.0).time_s for k in range(last + 3)]
    assert times[:last + 1] == sorted(set(times[:last + 1]), reverse=True)
    assert times[last:] == pytest.approx([times[last]] * 3)


def test_the_search_for_helpers_ends():
    assert forecast.last_helper_that_pays(job(8, 1, 100.0, 0.001), most=50) == 50


@pytest.mark.parametrize(("machines", "policy", "words"), [
    (job(4, 1), "ps", "1 server for 4 nodes with ranks takes 2.67 times as long as a ring, and 3 servers would be"),
    (job(2, 1), "optimal", "helpers cannot help two nodes with ranks"),
    (job(8, 10), "optimal", "2 helpers of 10 cannot help: from the 9th on"),
    (job(8, 2), "colocated", "leaves 2 helpers idle; placement optimal uses them"),
    (job(1, 1), "optimal", "its 1 helper has nothing to do"),
    ([Machine(True, 10.0)] * 7 + [Machine(True, 2.5), Machine(False, 10.0)], "optimal", "own NIC sets the time")])
def test_a_layout_that_cannot_win_is_warned_of(machines, policy, words):
    (warning,) = forecast.warnings(machines, policy)
    assert words in warning


@pytest.mark.parametrize(("machines", "policy"), [
    (job(8, 4), "optimal"), (job(8, 8), "optimal"), (job(8), "optimal"), (job(2), "optimal"), (job(1), "optimal"),
    (job(4, 3), "ps"), (job(8), "colocated"), (job(8, 4), "hash:mixed"), (job(1, 1), "ps")])
def test_a_layout_that_can_win_is_not(machines, policy):
    assert forecast.warnings(machines, policy) == []


@pytest.mark.parametrize(("machines", "policy", "line"), [
    (job(8, 4), "optimal", "placement optimal: 8 nodes with ranks, 4 helpers; a step of M bytes takes at least "
                           "1.273 M/B (a ring: 1.750 M/B)"),
    (job(2, 0, 3.125e9), "optimal", "placement optimal: 2 nodes with ranks, 0 helpers; a step of M bytes takes at "
                                    "least 320 ms/GB (a ring: 320 ms/GB)"),
    (job(1), "optimal", "placement optimal: 1 node with ranks, 0 helpers; all sums are local"),
    (job(4, 1), "hash:djb2", "placement hash:djb2: 4 nodes with ranks, 1 helper; no bound, for a hash does not balance "
                             "(placement optimal: 1.333 M/B, a ring: 1.500 M/B)")])
def test_the_first_line(machines, policy, line):
    assert forecast.first_line(machines, policy) == line
