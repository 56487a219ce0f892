"""Strategies: the paper's, found again; and never worse than its rule where it says nothing."""
from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.hardware.topology.copies import direct_pairs, islands_of
from bpsfast.hardware.topology.discovery import discover
from bpsfast.hardware.topology.graph import PartKind
from bpsfast.hardware.topology.loads import Traffic
from bpsfast.hardware.topology.strategy_solver import choose, islands_by_size, lower_bound, paper_rule
from bpsfast.orchestration.errors import ConfigError
from tests.support.gpu_machines import GIGA, dgx1, load, switched
from tests.sysfs_trees import INSIDES, NAMES

#: Eight machines, no helpers.
EIGHT = Traffic(service=0.75)


def by_switch(topology, **values):
    return choose(topology, islands=[islands_of(topology, PartKind.SWITCH)], **values)


@given(st.integers(1, 3), st.integers(1, 6), st.floats(0.3, 3.0))
@settings(max_examples=20, deadline=None)
def test_assisted_aggregation_takes_what_the_paper_says(n_switches, n_gpus, ratio):
    """J_ca = M / b * max(1, (2l - 1) / (kl)), b the switches' rate and k the GPUs' over it."""
    switch_rate = 10 * GIGA
    topology = switched((n_gpus,) * n_switches, tuple(range(n_switches)), ratio * switch_rate, switch_rate,
                        card_at=None, socket_rate=1e15)
    expected = max(1.0, (2 * n_gpus - 1) / (ratio * n_gpus))
    assert by_switch(topology).loads.time * switch_rate == pytest.approx(expected, rel=1e-5)


def test_assisted_aggregation_is_faster_than_a_ring_by_24_percent_and_near_the_optimum():
    topology = switched(wire_rate=1e15)
    found = by_switch(topology).loads.time
    ring = 2 * 7 / 8 / (80 / 8 * GIGA)  # its slowest copies cross sockets: 80 Gbit/s where 105 are had below a switch
    assert found / ring - 1 == pytest.approx(-0.238, abs=5e-4)
    assert found / lower_bound(topology).time == pytest.approx(1.094, abs=1e-3)


def test_the_best_mixes_in_a_fifth_of_plain_copies():
    found = choose(switched(wire_rate=1e15))
    assert [(way.share, max(map(len, way.islands))) for way in found.ways] == [
        (pytest.approx(0.8, rel=1e-5), 4), (pytest.approx(0.2, rel=1e-4), 1)]
    assert found.loads.time * 105 / 8 * GIGA == pytest.approx(1.6, rel=1e-5)


def test_slow_memory_ends_plain_copies():
    [way] = choose(switched(wire_rate=1e15, memory_rate=20 * GIGA)).ways
    assert way.islands == (("gpu0", "gpu1", "gpu2", "gpu3"), ("gpu4", "gpu5", "gpu6", "gpu7"))


@pytest.mark.parametrize(("roots", "expected"), [
    ((2,), 1.75), ((2, 3), 1.75), (range(8), 2.0), ((0,), 2.75)])
def test_loads_of_the_cards_switch_by_roots(roots, expected):
    topology = dgx1()
    found = choose(topology, EIGHT, [islands_of(topology, PartKind.NVSWITCH)], [f"gpu{root}" for root in roots])
    assert load(found.loads, "switch0", "socket0") == pytest.approx(expected, rel=1e-6)


def test_order_of_roots_is_the_papers():
    topology = dgx1()
    by_nvlink = [islands_of(topology, PartKind.NVSWITCH)]
    times = [choose(topology, EIGHT, by_nvlink, [f"gpu{root}" for root in roots]).loads.time
             for roots in ((2,), (2, 3), range(8), (0,))]
    assert times[0] == pytest.approx(times[1]) and times[1] < times[2] < times[3]


def test_with_nvlink_roots_are_off_the_cards_switch():
    found = choose(dgx1(), EIGHT)
    [way] = found.ways
    assert way.roots().keys() <= {"gpu2", "gpu3"} and len(way.islands) == 1
    assert paper_rule(dgx1(), EIGHT).ways[0].roots() == pytest.approx({"gpu2": 0.5, "gpu3": 0.5})


@st.composite
def machines(draw):
    per_switch = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    sockets = tuple(sorted(draw(st.lists(st.integers(0, 1), min_size=len(per_switch), max_size=len(per_switch)))))
    pairs = list(itertools.combinations(range(sum(per_switch)), 2))
    nvlinks = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12)) if pairs else []
    places = [None, *(f"switch{n}" for n in range(len(per_switch))), *(f"socket{n}" for n in range(max(sockets) + 1))]
    rate = st.floats(1.0, 60.0)
    return switched(per_switch, sockets, draw(rate) * GIGA, draw(rate) * GIGA, nvlinks, draw(st.sampled_from(places)),
                    draw(rate) * GIGA, draw(st.sampled_from([0.0, 50 * GIGA])), draw(rate) * GIGA)


@pytest.mark.parametrize("name", [*INSIDES, *NAMES])
def test_recorded_machines(recorded_machine, name):
    topology = discover(str(recorded_machine(name).root))
    bound, found, rule = (solve(topology, EIGHT) for solve in (lower_bound, choose, paper_rule))
    assert bound.time <= found.loads.time * (1 + 1e-6) and found.loads.time <= rule.loads.time * (1 + 1e-6)
    [way] = found.ways
    n_islands = {"dgx1": 1, "pcie_2x4": 2, "p3_16xlarge": 1, "hgx_h100": 1, "asymmetric_3_5": 2}
    assert len(way.islands) == n_islands.get(name, len(topology.of(PartKind.SOCKET)))


@given(machines(), st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_nothing_beats_the_optimum_and_the_rule_beats_nothing(topology, service):
    traffic = Traffic(service=service)
    bound, found, rule = (lower_bound(topology, traffic).time, choose(topology, traffic),
                          paper_rule(topology, traffic))
    assert bound <= found.loads.time * (1 + 1e-6) and found.loads.time <= rule.loads.time * (1 + 1e-6)
    assert sum(way.share for way in found.ways) == pytest.approx(1.0, abs=1e-5)
    for way in found.ways:
        for island in way.islands:
            assert sum(way.roots().get(gpu, 0.0) for gpu in island) == pytest.approx(1.0, abs=1e-4)
    for link, value in found.loads.links.items():
        assert value <= link.rate_bytes * found.loads.time * (1 + 1e-6)


def test_a_machine_without_gpus():
    found = choose(switched((), (0, 1), card_at="socket0"))
    assert found.loads.time == pytest.approx(1 / (12.5 * GIGA), rel=1e-6)
    assert load(found.loads, "socket0", "socket1") == pytest.approx(1.0)


def test_bytepss_switch_size():
    topology = switched()
    assert islands_by_size(topology, 4) == islands_of(topology, PartKind.SWITCH)
    with pytest.raises(ConfigError, match="BYTEPS_PCIE_SWITCH_SIZE=3: this machine's 8 GPUs are no multiple"):
        islands_by_size(topology, 3)


@given(st.integers(1, 6))
@settings(max_examples=6, deadline=None)
def test_one_island_across_switches_burdens_their_links(n_gpus):
    """The paper's strawman, BYTEPS_PCIE_SWITCH_SIZE=8: a ring over all l = 8 GPUs, (2l - 1) / l on each GPU's link."""
    topology = switched((n_gpus, n_gpus))
    total = 2 * n_gpus
    strawman = choose(topology, islands=[islands_by_size(topology, total)], roots=[f"gpu{n}" for n in range(total)])
    assert load(strawman.loads, "gpu0", "switch0") == pytest.approx((2 * total - 1) / total)
    crossing = 2 * (total - 1) / total + 1 / 2  # in and out of the ring, and half of the copies
    assert load(strawman.loads, "switch0", "socket0") == pytest.approx(crossing)
    assert crossing > load(by_switch(topology).loads, "switch0", "socket0")


@given(st.integers(1, 6), st.floats(0.0, 1.0))
@settings(max_examples=12, deadline=None)
def test_straight_to_the_card_relieves_the_link_to_memory(n_gpus, service):
    """Below one switch with the card, l GPUs: (2l - 1) / l on their links, and only what is summed for others above."""
    topology = switched((n_gpus,), (0,), card_at="switch0")
    traffic, islands = Traffic(service=service), [islands_of(topology, PartKind.SWITCH)]
    gpus = [part.name for part in topology.of(PartKind.GPU)]
    through_memory = choose(topology, traffic, islands, gpus)
    straight = choose(topology, traffic, islands, gpus, direct_pairs(topology))
    assert load(through_memory.loads, "switch0", "socket0") == pytest.approx(2.0 + service)
    assert load(straight.loads, "switch0", "socket0") == pytest.approx(service, abs=1e-5)
    assert load(straight.loads, "gpu0", "switch0") == pytest.approx((2 * n_gpus - 1) / n_gpus, rel=1e-5)
    assert straight.loads.cards == pytest.approx({"nic0": 1.0 + service}, rel=1e-5)
    [way] = straight.ways
    assert way.copied == pytest.approx({(gpu, "nic0"): 1 / n_gpus for gpu in gpus}, rel=1e-4)


def test_straight_to_the_card_with_nvlink():
    """On the card's switch: 1.75 M above it through memory, 0.75 M straight; the card's slot is what is left."""
    topology = dgx1(wire_rate=1e15)
    found = choose(topology, EIGHT, direct=direct_pairs(topology))
    assert load(found.loads, "switch0", "socket0") == pytest.approx(0.75)
    assert found.loads.time * 16 * GIGA == pytest.approx(1.75, rel=1e-6)
    assert found.loads.time == pytest.approx(lower_bound(topology, EIGHT, direct_pairs(topology)).time, rel=1e-6)
    assert "directly to nic0" in found.lines()[0]


def test_what_only_memory_can_add_goes_through_memory():
    topology = switched((2, 2), (0, 0), card_at="switch0")
    found = choose(topology, islands=[islands_of(topology, PartKind.SWITCH)], direct=direct_pairs(topology))
    assert {end for way in found.ways for _, end in way.copied} == {"socket0"}


@given(machines(), st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_a_way_more_is_never_slower_and_no_faster_than_its_bound(topology, service):
    traffic, direct = Traffic(service=service), direct_pairs(topology)
    found = choose(topology, traffic, direct=direct)
    assert found.loads.time <= choose(topology, traffic).loads.time * (1 + 1e-6)
    assert lower_bound(topology, traffic, direct).time <= found.loads.time * (1 + 1e-6)
    for way in found.ways:
        for island in way.islands:
            assert sum(way.roots().get(gpu, 0.0) for gpu in island) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("values", "text"), [
    ({"roots": ["gpu9"]}, "gpu9 cannot be a root.*gpu0, gpu1"),
    ({"islands": [(("gpu0",), ("gpu1", "gpu2"))]}, "do not hold each GPU"),
])
def test_strange_wishes_are_refused(values, text):
    with pytest.raises(ConfigError, match=text):
        choose(switched((2, 2)), **values)


def test_words():
    said = choose(switched(wire_rate=1e15)).lines()
    assert said[0].startswith("80.0% of the gradient: summed in {gpu0, gpu1, gpu2, gpu3} and in {gpu4")
    assert said[1].startswith("20.0% of the gradient: by each for itself; 100% from gpu0 to socket")
    assert choose(switched((), (0, 1))).lines() == [
        "100.0% of the gradient: by each for itself; added in memory, where it is"]
