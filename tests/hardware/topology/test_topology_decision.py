"""What settings force, what is computed, and what there is without SciPy."""
from __future__ import annotations

import logging
import sys

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.base.settings import Settings
from bpsfast.hardware.topology import decision
from bpsfast.hardware.topology.decision import forced, strategy_of
from bpsfast.hardware.topology.strategy_solver import choose, islands_by_size, nearest_socket_strategy, paper_grouping
from bpsfast.orchestration.errors import ConfigError
from tests.hardware.topology.test_topology_strategies import EIGHT
from tests.support.gpu_machines import dgx1, switched


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(decision, "_logged", set())


@pytest.fixture
def without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)


def test_roots_add_up_all_gpus():
    found = forced(dgx1(), Settings(reduce_roots=" 3, 2,2"))
    assert found.islands == (tuple(f"gpu{n}" for n in range(8)),) and found.roots == ("gpu2", "gpu3")
    assert set(strategy_of(dgx1(), Settings(reduce_roots="0,1"), EIGHT).ways[0].roots()) == {"gpu0", "gpu1"}


@given(st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_a_switch_size_makes_islands_if_it_divides_the_gpus(n_gpus, size):
    topology = switched((n_gpus,), (0,))
    found = forced(topology, Settings(pcie_switch_size=size))
    if n_gpus % size:
        assert found is None
    else:
        assert found.islands == islands_by_size(topology, size) and len(found.roots) == n_gpus
        assert found.by == f"pcie_switch_size = {size}"


def test_a_size_that_does_not_divide_is_ignored_with_one_warning(caplog):
    for _ in range(2):
        found = strategy_of(switched(), Settings(pcie_switch_size=3), EIGHT)
    assert found == choose(switched(), EIGHT)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "BPSFAST_PCIE_SWITCH_SIZE = 3 (or BYTEPS_PCIE_SWITCH_SIZE) is ignored: the 8 GPUs of machine by formula are no "
        "multiple of it"]


@pytest.mark.parametrize(("values", "text"), [
    ({"reduce_roots": "2,8"},
     r"BPSFAST_REDUCE_ROOTS = 2,8 \(or BYTEPS_REDUCE_ROOTS\): there is no local rank 8.*0 to 7"),
    ({"reduce_roots": "2", "pcie_switch_size": 4},
     "BYTEPS_REDUCE_ROOTS, BYTEPS_PCIE_SWITCH_SIZE.*contradict each other"),
])
def test_what_the_machine_has_not_is_refused(values, text):
    with pytest.raises(ConfigError, match=text):
        strategy_of(switched(), Settings(**values))


def test_one_island_of_all_goes_with_roots():
    assert forced(dgx1(), Settings(reduce_roots="2", pcie_switch_size=8)).roots == ("gpu2",)
    assert forced(dgx1(), Settings(reduce_roots="2", pcie_switch_size=5)).by == "reduce_roots = 2"


def test_a_helper_without_gpus_has_nothing_to_force():
    assert forced(switched((), (0,)), Settings(reduce_roots="2", pcie_switch_size=4)) is None


def test_the_log_says_once_where_it_comes_from(caplog):
    with caplog.at_level(logging.INFO, "bpsfast.hardware.topology"):
        for _ in range(2):
            assert strategy_of(dgx1(), Settings(), EIGHT) == choose(dgx1(), EIGHT)
            strategy_of(dgx1(), Settings(reduce_roots="2"), EIGHT)
    assert [record.message for record in caplog.records] == [
        "machine by formula sums its gradients by the best strategy for its links",
        "machine by formula sums its gradients as reduce_roots = 2 asks"]


def test_without_scipy_it_is_the_papers_rule_and_says_so_once(caplog, without_scipy):
    for _ in range(2):
        assert strategy_of(dgx1(), Settings(), EIGHT) == nearest_socket_strategy(dgx1(), paper_grouping(dgx1()), EIGHT)
    [record] = caplog.records
    assert "OSDI'20's rule" in record.message and "pip install 'bpsfast[plan]'" in record.message


def test_without_scipy_what_is_forced_is_obeyed(without_scipy):
    found = strategy_of(dgx1(), Settings(reduce_roots="0"), EIGHT)
    assert found.ways[0].copied == {("gpu0", "socket0"): 1.0}


def test_a_machine_without_gpus_needs_no_scipy_and_no_warning(caplog, without_scipy):
    assert strategy_of(switched((), (0, 1)), Settings()).loads.time > 0.0
    assert not caplog.records


def test_gpus_send_straight_to_a_card_only_if_asked_to():
    asked = strategy_of(dgx1(), Settings(gpu_direct=True), EIGHT)
    assert {end for _, end in asked.ways[0].copied} == {"nic0"}
    assert {end for _, end in strategy_of(dgx1(), Settings(), EIGHT).ways[0].copied} == {"socket0"}
    forced_too = strategy_of(dgx1(), Settings(gpu_direct=True, reduce_roots="1"), EIGHT)
    assert forced_too.ways[0].copied == {("gpu1", "nic0"): pytest.approx(1.0)}
    with pytest.raises(ConfigError, match="BPSFAST_GPU_DIRECT"):
        strategy_of(switched(), Settings(gpu_direct=True))


def test_without_scipy_nothing_goes_straight_and_one_warning_says_so(caplog, without_scipy):
    found = strategy_of(dgx1(), Settings(gpu_direct=True, reduce_roots="0"))
    assert found.ways[0].copied == {("gpu0", "socket0"): 1.0}
    assert "BPSFAST_GPU_DIRECT is on" in caplog.text and "scipy is missing" in caplog.text
