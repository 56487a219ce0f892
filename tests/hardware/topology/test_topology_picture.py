"""Where parts are drawn. Pictures themselves: `test_topo_command`."""
from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from bpsfast.hardware.topology import discovery, display
from bpsfast.hardware.topology.graph import PartKind, Topology
from tests.hardware.topology.test_topology_graph import topologies
from tests.sysfs_trees import INSIDES
from tests.sysfs_trees.machine import Machine


@pytest.mark.parametrize("name", INSIDES)
def test_every_part_has_a_place_of_its_own(name: str, recorded_machine: Callable[[str], Machine]) -> None:
    topology = discovery.discover(str(recorded_machine(name).root))
    places = display.layout(topology)
    assert places.keys() == {part.name for part in topology.parts}
    assert len(set(places.values())) == len(places)
    assert len({places[gpu.name][1] for gpu in topology.of(PartKind.GPU)}) <= 1


@settings(deadline=None)
@given(topologies())
def test_any_machine_can_be_laid_out(topology: Topology) -> None:
    assert display.layout(topology).keys() == {part.name for part in topology.parts}


def test_a_switch_stands_above_what_hangs_below(recorded_machine: Callable[[str], Machine]) -> None:
    places = display.layout(discovery.discover(str(recorded_machine("dgx1").root)))
    assert places["switch0"] == (1.0, -1.0) and places["gpu0"] == (1.0, -2.0) and places["socket0"] == (2.5, 0.0)
