"""Partitions are cut finer where whole ones are too coarse, and nowhere else."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.messages import TensorSpec
from bpsfast.orchestration.placement.assignment import assign, step_time_s
from bpsfast.orchestration.placement.layout import LEAST_NBYTES, lay_out, refine
from bpsfast.orchestration.placement.partition import plan_units
from bpsfast.orchestration.placement.shares import Machine, optimal_shares
from bpsfast.tools.planner import catalog

PART = 4096000


def equal(n, k):
    return [Machine(True, 1.0)] * n + [Machine(False, 1.0)] * k


def gap(units, machines):
    """How far the placement is above the optimum, as a fraction."""
    sizes = [part.nbytes for unit in units for part in unit.parts]
    return step_time_s(zip(sizes, assign(sizes, machines)), machines) / optimal_shares(machines, sum(sizes)).time_s - 1


def check_cut(before, after, page_nbytes=4096):
    """The same units; parts numbered on without gaps, even, whole pages, covering every byte."""
    assert [(u.unit, u.nbytes, u.members) for u in after] == [(u.unit, u.nbytes, u.members) for u in before]
    parts = [part for unit in after for part in unit.parts]
    first = next((part.part for unit in before for part in unit.parts), 0)
    assert [part.part for part in parts] == list(range(first, first + len(parts)))
    for unit in after:
        assert [part.offset for part in unit.parts] == list(range(0, unit.nbytes, unit.stride))
        assert sum(part.nbytes for part in unit.parts) == unit.nbytes
        assert unit.stride % page_nbytes == 0


@pytest.mark.parametrize(("name", "n", "k", "before", "after"), [
    ("vgg16", 32, 16, 0.06, 0.015), ("bert-large", 32, 16, 0.06, 0.015), ("resnet50", 8, 4, 0.027, 0.015),
    ("resnet50", 16, 8, 0.09, 0.015), ("gpt2", 32, 16, 0.04, 0.015), ("transformer", 32, 16, 0.14, 0.015),
])
def test_published_lists_come_within_the_tolerance(name, n, k, before, after):
    specs = catalog.load(name).specs()
    units = plan_units(specs, 5, 70, PART, PART)
    refined = refine(units, equal(n, k))
    assert gap(units, equal(n, k)) > before and gap(refined, equal(n, k)) <= after
    check_cut(units, refined)
    assert sum(len(unit.parts) for unit in refined) <= 4 * sum(len(unit.parts) for unit in units)


def test_what_is_near_the_bound_is_left_alone():
    units = plan_units(catalog.load("ugatit").specs(), 0, 0, PART, PART)
    assert refine(units, equal(8, 4)) == units


@pytest.mark.parametrize("machines", [equal(1, 3), equal(2, 0), equal(2, 2)])
def test_where_any_placement_is_optimal_nothing_is_cut(machines):
    units = plan_units([TensorSpec(name="x", dtype="uint8", shape=(50 << 20,))], 0, 0, PART, PART)
    assert refine(units, machines) == units


def test_a_tensor_without_bytes_stays_without_partitions():
    specs = [TensorSpec(name="e", dtype="uint8", shape=(0,)), TensorSpec(name="x", dtype="uint8", shape=(9 << 20,))]
    units = plan_units(specs, 0, 3, PART, PART)
    refined = refine(units, equal(8, 0))
    assert refined[0] == units[0] and len(refined[1].parts) > len(units[1].parts)
    check_cut(units, refined)
    assert refine(units[:1], equal(8, 0)) == units[:1]


def test_whoever_asked_for_a_partition_size_gets_it():
    specs = [TensorSpec(name="x", dtype="uint8", shape=(9 << 20,), partition_nbytes=3 << 20)]
    units = lay_out(specs, equal(8, 4), policy="optimal", partition_nbytes=PART, fusion_nbytes=PART)
    assert [part.nbytes for part in units[0].parts] == [3 << 20] * 3


def test_only_the_optimal_placement_cuts():
    specs = catalog.load("vgg16").specs()
    for policy in ("ps", "colocated", "hash:mixed"):
        units = lay_out(specs, equal(32, 16), policy=policy, partition_nbytes=PART, fusion_nbytes=PART)
        assert sum(len(unit.parts) for unit in units) == 142


def test_what_is_owned_already_is_not_hoped_away():
    # node 0 owns more than its share of the whole: cutting the rest cannot bring that back
    specs = [TensorSpec(name="x", dtype="uint8", shape=(8 << 20,))]
    units = plan_units(specs, 0, 0, PART, PART)
    assert refine(units, equal(4, 0), [64 << 20, 0, 0, 0]) == units


def test_partitions_are_numbered_below_their_limit():
    units = plan_units(catalog.load("vgg16").specs(), 0, 0, PART, PART)
    refined = refine(units, equal(32, 16), most_parts=150)
    assert sum(len(unit.parts) for unit in refined) <= 150


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40 << 20), min_size=1, max_size=12), st.integers(2, 12), st.integers(0, 8),
       st.sampled_from([4096, 65536]))
def test_never_worse_never_smaller_than_allowed(sizes, n, k, page_nbytes):
    specs = [TensorSpec(name=str(i), dtype="uint8", shape=(size,)) for i, size in enumerate(sizes)]
    units = plan_units(specs, 0, 0, PART, PART, page_nbytes)
    refined = refine(units, equal(n, k), page_nbytes=page_nbytes)
    check_cut(units, refined, page_nbytes)
    assert refined == refine(units, equal(n, k), page_nbytes=page_nbytes)
    for before, after in zip(units, refined):
        assert after.stride == before.stride or after.stride >= LEAST_NBYTES
    if sum(sizes):
        assert gap(refined, equal(n, k)) <= gap(units, equal(n, k)) + 1e-12
