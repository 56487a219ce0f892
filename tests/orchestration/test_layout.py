"""Tensors become partitions with owners, the same on every call."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.orchestration.placement.assignment import step_time_s
from bpsfast.orchestration.placement.layout import lay_out
from bpsfast.orchestration.placement.shares import Machine, optimal_shares
from bpsfast.tools.planner import catalog

SIZES = {"partition_nbytes": 4096000, "fusion_nbytes": 4096000}
MACHINES = [Machine(True, 1.0)] * 8 + [Machine(False, 1.0)] * 4


@pytest.mark.parametrize("name", ["vgg16", "bert-large", "resnet50"])
def test_published_lists_are_placed_within_the_tolerance(name):
    specs = catalog.load(name).specs()
    units = lay_out(specs, MACHINES, policy="optimal", **SIZES)
    assert units == lay_out(specs, MACHINES, policy="optimal", **SIZES)
    parts = [(part.nbytes, part.owner) for unit in units for part in unit.parts]
    best = optimal_shares(MACHINES, sum(nbytes for nbytes, _ in parts)).time_s
    assert best <= step_time_s(parts, MACHINES) <= best * 1.015
    assert min(owner for _, owner in parts) >= 0


def test_units_and_partitions_are_numbered_from_where_the_job_is():
    specs = [TensorSpec(name=name, dtype="float32", shape=(2_000_000,)) for name in "ab"]
    units = lay_out(specs, MACHINES[:2], policy="optimal", **SIZES, first_unit=7, first_part=30)
    assert [unit.unit for unit in units] == [7, 8]
    assert [part.part for unit in units for part in unit.parts] == [30, 31, 32, 33]


def test_hash_policies_see_the_numbers_of_units():
    specs = [TensorSpec(name=str(i), dtype="uint8", shape=(4096,)) for i in range(40)]
    first = lay_out(specs, MACHINES, policy="hash:djb2", **SIZES)
    later = lay_out(specs[:20], MACHINES, policy="hash:djb2", **SIZES, first_unit=20, first_part=20)
    assert [u.parts[0].owner for u in first[20:]] == [u.parts[0].owner for u in later]


def test_a_policy_that_cannot_place_is_an_error():
    with pytest.raises(ConfigError, match="has none"):
        lay_out([TensorSpec(name="x", dtype="uint8", shape=(1,))], MACHINES[:8], policy="ps", **SIZES)
