"""The rates of a machine with a strategy, compared with calculations by hand."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.bench.paper import machines
from bpsfast.bench.paper.figure_14 import TRAFFIC, nvlink_way, pcie_way
from bpsfast.bench.paper.intra_machine import inside, n_slices
from bpsfast.hardware.topology.strategy_solver import choose
from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.simulator.all_reduce import Ring
from tests.support.gpu_machines import switched

pytest.importorskip("scipy", reason="scipy is not installed")
GBIT = 1e9 / 8
FREE = Ring()
PARTITION = 4_096_000


def gbits(topology, way, ring=FREE):
    found = inside(topology, way, TRAFFIC, ring, PARTITION)
    return found.card_rate / GBIT, found.stage_rate / GBIT


@pytest.mark.parametrize(("roots", "card", "stage"), [
    ((2,), 90, 80),  # only the card uses its link; copies have another
    ((2, 3), 90, 80),
    (range(8), 80 * 1.75 / 2, 40),  # a quarter of the copies are on the card's link
    ((0,), 80 * 1.75 / 2.75, 80 / 2.75),  # all copies are on it
])
def test_nvlink(roots, card, stage):
    topology = machines.nvlink()
    assert gbits(topology, nvlink_way(topology, roots)) == pytest.approx((card, stage), rel=1e-6)


@pytest.mark.parametrize(("size", "stage"), [
    (4, 105 / (7 / 4)),  # links of GPUs
    (8, 80 / 2.25),  # links of switches: in and out of a ring, and half of the copies
])
def test_pcie(size, stage):
    topology = machines.pcie_only()
    assert gbits(topology, pcie_way(topology, size)) == pytest.approx((90, stage), rel=1e-6)


def test_slices_follow_the_rings_bytes_and_not_the_copies():
    topology = machines.pcie_only()
    way = pcie_way(topology, 4)
    slow = Ring(overhead_s=1e-3)
    seconds = 2 * 3 / 4 / (105 * GBIT) + 2 * 6 * 1e-3 / PARTITION  # three of four parts with two slices each, twice
    assert gbits(topology, way, slow)[1] == pytest.approx(1 / seconds / GBIT, rel=1e-6)


@given(st.integers(1, 64), st.integers(1, 1 << 20))
@settings(max_examples=30, deadline=None)
def test_slices(n_pages, slice_nbytes):
    nbytes, topology = 4096 * n_pages, machines.nvlink()
    ring = Ring(slice_nbytes=slice_nbytes)
    assert n_slices(nvlink_way(topology, (0,)), ring, nbytes) == -(-nbytes // slice_nbytes)
    assert n_slices(nvlink_way(topology, range(8)), ring, nbytes) == 7 * -(-nbytes // (8 * slice_nbytes))


def test_gpus_alone_have_no_rings():
    topology = switched((1,), (0,))
    assert n_slices(choose(topology), FREE, PARTITION) == 0
    found = inside(topology, choose(topology), TRAFFIC, Ring(overhead_s=1.0), PARTITION)
    assert found.stage_rate == pytest.approx(105 * GBIT)


def test_a_card_of_unknown_rate_is_as_fast_as_its_links_let_it():
    topology = switched((1,), (0,), wire_rate=0.0)
    assert inside(topology, choose(topology), TRAFFIC, FREE, PARTITION).card_rate == float("inf")


def test_one_card_is_simulated():
    topology = switched(card_at=None)
    with pytest.raises(ConfigError, match="has 0 network cards; one is simulated"):
        inside(topology, choose(topology), TRAFFIC, FREE, PARTITION)
