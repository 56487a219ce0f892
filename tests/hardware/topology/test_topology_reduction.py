"""What islands put on links while they add up among themselves."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.hardware.topology.graph import LinkKind
from bpsfast.hardware.topology.loads import LinkLoads, Traffic, reduce_to
from tests.support.gpu_machines import dgx1, load, switched


def reduced(topology, island, parts):
    """Return the loads for *parts*: root -> its part of the gradient."""
    budget = LinkLoads(topology, Traffic())
    for root in parts:
        reduce_to(budget, island, root, root)
    return budget.loads(parts)


def gpus(count):
    return tuple(f"gpu{number}" for number in range(count))


def test_below_a_switch_each_sends_to_the_root():
    loads = reduced(switched((3,), (0,)), gpus(3), {"gpu0": 1.0})
    assert [load(loads, gpu, "switch0") for gpu in gpus(3)] == [2.0, 1.0, 1.0]
    assert load(loads, "switch0", "socket0") == 0.0


@given(st.integers(2, 5))
@settings(max_examples=4, deadline=None)
def test_a_ring_across_switches_crosses_each_once_a_way(per_switch):
    n = 2 * per_switch
    loads = reduced(switched((per_switch, per_switch)), gpus(n), dict.fromkeys(gpus(n), 1 / n))
    assert load(loads, "gpu1", "switch0") == pytest.approx(2 * (n - 1) / n)
    assert load(loads, "switch0", "socket0") == load(loads, "socket0", "socket1") == pytest.approx(2 * (n - 1) / n)


def test_a_chain_ends_at_its_root():
    loads = reduced(switched((1, 1, 1), (0, 0, 0)), gpus(3), {"gpu1": 1.0})
    assert [load(loads, gpu, f"switch{at}") for at, gpu in enumerate(gpus(3))] == [2.0, 1.0, 1.0]  # 2, 0, 1


def test_over_nvlink_no_pcie_link_is_used():
    loads = reduced(dgx1(), gpus(8), {"gpu2": 1.0})
    assert {link.kind for link, value in loads.links.items() if value} == {LinkKind.NVLINK}
    for gpu in gpus(8):
        of_gpu = [link for link in loads.links if link.kind is LinkKind.NVLINK and gpu in (link.a, link.b)]
        assert sum(loads.links[link] for link in of_gpu) == pytest.approx(2.0)  # in and out
