"""What variables put on links, cards and memories, worked out by hand."""
from __future__ import annotations

import pytest

from bpsfast.hardware.topology.copies import copies
from bpsfast.hardware.topology.linear_program import LinearProgram
from bpsfast.hardware.topology.loads import LinkLoads, Traffic
from tests.support.gpu_machines import GIGA, load, switched


def sent(topology, traffic, values):
    budget = LinkLoads(topology, traffic)
    budget.send(LinearProgram())
    return budget.loads(values)


def test_a_sum_and_what_is_summed_for_others_cross_the_card():
    loads = sent(switched((1,), (0,)), Traffic(1.0, 0.5), {("worker", "socket0", "nic0"): 1.0,
                                                          ("service", "socket0", "nic0"): 1.0})
    assert load(loads, "nic0", "socket0") == loads.cards["nic0"] == 1.5
    assert loads.memories["socket0"] == 3 * 1.0 + 4 * 0.5
    assert loads.time == pytest.approx(1.5 / (12.5 * GIGA))


def test_from_the_other_socket_it_crosses_what_joins_them():
    loads = sent(switched((1,), (1,)), Traffic(), {("worker", "socket1", "nic0"): 1.0})
    assert load(loads, "socket0", "socket1") == 1.0 and loads.memories["socket0"] == 0.0


def test_a_copy_counts_on_each_link_and_at_a_sockets_memory():
    topology = switched((2,), (0,), memory_rate=30 * GIGA)
    budget = LinkLoads(topology, Traffic())
    [copy] = [each for each in copies(topology) if (each.begin, each.end) == ("gpu1", "socket0")]
    budget.carry(copy, "x")
    loads = budget.loads({"x": 0.5})
    assert load(loads, "gpu1", "switch0") == load(loads, "switch0", "socket0") == 0.5
    assert load(loads, "gpu0", "switch0") == 0.0 and loads.memories == {"socket0": 1.5}
    assert loads.time == pytest.approx(1.5 / (30 * GIGA))
