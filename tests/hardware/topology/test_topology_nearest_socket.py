"""Strategies without a solver: loads by hand, and never better than with one."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.hardware.topology.discovery import discover
from bpsfast.hardware.topology.graph import Link, LinkKind, Part, PartKind, Topology
from bpsfast.hardware.topology.loads import Traffic
from bpsfast.hardware.topology.strategy_solver import choose, nearest_socket_strategy, paper_grouping
from bpsfast.orchestration.errors import ConfigError
from tests.hardware.topology.test_topology_strategies import EIGHT, machines
from tests.support.gpu_machines import GIGA, dgx1, load, switched
from tests.sysfs_trees import INSIDES, NAMES


def test_switches_sum_and_memory_adds():
    found = nearest_socket_strategy(switched(), paper_grouping(switched()))
    [way] = found.ways
    assert len(way.islands) == 2 and way.copied["gpu5", "socket1"] == 0.25
    assert load(found.loads, "gpu0", "switch0") == pytest.approx(7 / 4)
    assert load(found.loads, "switch1", "socket1") == load(found.loads, "socket0", "socket1") == pytest.approx(1.0)
    assert found.loads.cards["nic0"] == 1.0


def test_the_papers_roots_leave_the_card_its_link():
    found = nearest_socket_strategy(dgx1(), paper_grouping(dgx1()), EIGHT)
    assert found.ways[0].roots() == {"gpu2": 0.5, "gpu3": 0.5}
    assert load(found.loads, "switch0", "socket0") == pytest.approx(1.75)


def test_two_cards_send_half_each():
    base = switched(card_at=None)
    cards = tuple(Part(f"nic{at}", PartKind.NIC, wire_rate_bytes=12.5 * GIGA) for at in range(2))
    links = tuple(Link(f"nic{at}", f"socket{at}", LinkKind.PCIE, 16 * GIGA) for at in range(2))
    topology = Topology("two cards", base.parts + cards, base.links + links)
    found = nearest_socket_strategy(topology, paper_grouping(topology))
    assert found.loads.cards == {"nic0": 0.5, "nic1": 0.5}
    assert load(found.loads, "socket0", "socket1") == pytest.approx(1.0)  # half of each, both ways


def test_a_machine_without_gpus_brings_its_sockets_together():
    topology = switched((), (0, 1))
    found = nearest_socket_strategy(topology, paper_grouping(topology))
    assert load(found.loads, "socket0", "socket1") == pytest.approx(1.0)


def test_what_hangs_nowhere_is_refused():
    topology = Topology("loose", (Part("socket0", PartKind.SOCKET), Part("gpu0", PartKind.GPU)), ())
    with pytest.raises(ConfigError, match="no path leads from gpu0"):
        nearest_socket_strategy(topology, paper_grouping(topology))


@pytest.mark.parametrize("name", [*INSIDES, *NAMES])
def test_recorded_machines(recorded_machine, name):
    topology = discover(str(recorded_machine(name).root))
    solved, found = choose(topology, EIGHT), nearest_socket_strategy(topology, paper_grouping(topology), EIGHT)
    assert solved.loads.time <= found.loads.time * (1 + 1e-6)
    assert sum(found.loads.cards.values()) == pytest.approx(1.75 if topology.of(PartKind.NIC) else 0.0)


@given(machines(), st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_a_solver_is_never_worse_for_the_same_islands_and_roots(topology, service):
    traffic = Traffic(service=service)
    given_by_rule = paper_grouping(topology)
    found = nearest_socket_strategy(topology, given_by_rule, traffic)
    solved = choose(topology, traffic, [given_by_rule.islands], given_by_rule.roots)
    assert solved.loads.time <= found.loads.time * (1 + 1e-6)
    for island in given_by_rule.islands:
        assert sum(found.ways[0].roots().get(gpu, 0.0) for gpu in island) == pytest.approx(1.0)
