"""The bound against what can be worked out by hand."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.hardware.topology.graph import Part, PartKind, Topology
from bpsfast.hardware.topology.loads import Traffic
from bpsfast.hardware.topology.strategy_solver import lower_bound
from bpsfast.orchestration.errors import ConfigError
from tests.support.gpu_machines import GIGA, dgx1, switched


def test_two_switches_of_four_mix_a_fifth_of_plain_copies():
    """OSDI'20 section 4.1: max(3x + 1, (7 - 3x) / 4) is least, 1.6, at x = 1/5."""
    topology = switched(wire_rate=1e15)
    assert lower_bound(topology).time * 105 / 8 * GIGA == pytest.approx(1.6, rel=1e-6)


@given(st.integers(1, 3), st.integers(1, 6), st.floats(0.2, 5.0))
@settings(max_examples=20, deadline=None)
def test_equal_switches_have_a_closed_form(n_switches, n_gpus, ratio):
    """With D copied to memory below each switch, GPU links carry 2 - D / l, the switch's D; 1 <= D <= l."""
    gpu_rate = 10 * GIGA
    topology = switched((n_gpus,) * n_switches, tuple(range(n_switches)), gpu_rate, ratio * gpu_rate, card_at=None,
                        socket_rate=1e15)
    crossing = 2.0 / (1.0 / ratio + 1.0 / n_gpus)  # where D / ratio = 2 - D / l
    copied = min(max(crossing, 1.0), n_gpus)
    by_hand = max(2.0 - copied / n_gpus, copied / ratio)
    assert lower_bound(topology).time * gpu_rate == pytest.approx(by_hand, rel=1e-5)


def test_the_card_is_what_a_machine_with_nvlink_waits_for():
    found = lower_bound(dgx1(wire_rate=1e15), Traffic(service=0.75))
    assert found.time * 13 * GIGA == pytest.approx(1.75, rel=1e-6)


def test_memory_counts_where_it_is_slow():
    slow = lower_bound(switched(memory_rate=1 * GIGA)).time
    assert slow > 2 * lower_bound(switched()).time


def test_one_gpu_alone_only_copies():
    topology = switched((1,), (0,), card_at=None)
    assert lower_bound(topology).time * 105 / 8 * GIGA == pytest.approx(1.0, rel=1e-6)


def test_a_machine_without_gpus_brings_its_sockets_together():
    topology = switched((), (0, 1), socket_rate=20 * GIGA, wire_rate=1e15, card_at="socket0")
    assert lower_bound(topology).time == pytest.approx(1 / (16 * GIGA), rel=1e-6)  # the card's slot


def test_no_memory_is_refused():
    with pytest.raises(ConfigError, match="has no socket"):
        lower_bound(Topology("bare", (Part("gpu0", PartKind.GPU),), ()))


def test_a_card_that_hangs_nowhere_is_refused():
    parts = Part("socket0", PartKind.SOCKET), Part("nic0", PartKind.NIC)
    with pytest.raises(ConfigError, match="no path leads from a socket to a network card"):
        lower_bound(Topology("loose", parts, ()))
