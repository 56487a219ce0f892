"""A generation as one node has prepared it: what a unit uses here, and what a new owner of its partitions adds."""
from __future__ import annotations

from bpsfast.node.generation import Generation, UnitResources
from bpsfast.node.regions import Regions
from bpsfast.orchestration.messages import Plan


def test_a_holding_absorbs_what_a_succession_uses_once():
    regions = Regions()
    place, _ = regions.slots.allocate(100)
    resources = UnitResources(bound=[(1, 7), (2, 7)], arriving={7: (1, 2), 8: (3, 4)})
    resources.absorb(UnitResources(bound=[(2, 7), (3, 7)], places=[(regions.slots, place, 100)], arriving={8: (5, 6)}))
    assert resources.bound == [(1, 7), (2, 7), (3, 7)], "who is expected anew is parted with once"
    assert resources.places == [(regions.slots, place, 100)] and resources.arriving == {7: (1, 2), 8: (5, 6)}
    assert resources.extents == {} and resources.coded == []
    regions.close()


def test_a_generation_concerns_ranks_that_push_one_of_its_units():
    assert not Generation(Plan(generation=1, units=())).concerns((0, 1))
