"""Memory of stores on their owner: as much as was asked for, and used again."""
from __future__ import annotations

import msgspec
import pytest

from bpsfast.base.settings import Settings
from bpsfast.orchestration.messages import Plan, TensorSpec
from bpsfast.orchestration.placement.partition import plan_units
from bpsfast.orchestration.store import StoreSpec
from tests.support.two_nodes import End, connect

MIB = 1 << 20


@pytest.fixture
def end(no_leaks):
    """One node of two."""
    settings = Settings(transport="tcp", start_timeout_s=20.0, engine_threads=1, huge_pages="off")
    both = [End(index, settings) for index in range(2)]
    try:
        connect(both)
        for each in both:
            each.finish()
        yield both[0]
    finally:
        for each in both:
            each.close()


def plan_of(generation, first, sizes):
    """Return a plan of a store for each of *sizes*, in bytes, owned by node 0."""
    specs = [TensorSpec(name=f"w{first + i}", dtype="float32", shape=(nbytes // 4,), store=StoreSpec())
             for i, nbytes in enumerate(sizes)]
    units = plan_units(specs, first, 10 * first, 8 * MIB, 0)
    return Plan(generation=generation, units=tuple(
        msgspec.structs.replace(unit, store_unit=unit.unit, n_workers=1, parts=tuple(
            msgspec.structs.replace(part, owner=0) for part in unit.parts)) for unit in units))


def test_a_store_in_a_hole_is_not_asked_for_again(end):
    stores = end.runtime.regions.stores
    first = end.runtime.installer.prepare(plan_of(1, 0, [MIB]))
    assert end.runtime.regions.nbytes_by_kind()["store"] == 2 * MIB, "the smallest segment: half of it is free"
    second = end.runtime.installer.prepare(plan_of(1, 1, [MIB, 3 * MIB]))
    assert end.runtime.regions.nbytes_by_kind()["store"] == 5 * MIB
    for generation in (second, first):
        end.runtime.installer.drop(generation)
    assert stores.free_nbytes == 5 * MIB
