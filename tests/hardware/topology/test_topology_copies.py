"""Which copies a machine can make, and over which links."""
from __future__ import annotations

import pytest

from bpsfast.hardware.topology.copies import between_gpus, copies, islands_of, socket_of, switch_of
from bpsfast.hardware.topology.graph import Link, LinkKind, Part, PartKind, Topology
from bpsfast.orchestration.errors import ConfigError
from tests.support.gpu_machines import GIGA, dgx1, switched


def ends(topology):
    return {(copy.begin, copy.end) for copy in copies(topology)}


def test_gpus_below_one_switch_copy_to_each_other_and_across_switches_they_do_not():
    found = ends(switched((2, 2)))
    assert {("gpu0", "gpu1"), ("gpu3", "gpu2")} <= found and ("gpu1", "gpu2") not in found


def test_every_gpu_reaches_every_socket_and_sockets_each_other():
    found = ends(switched((2, 2)))
    assert {(f"gpu{gpu}", f"socket{socket}") for gpu in range(4) for socket in range(2)} <= found
    assert {("socket0", "socket1"), ("socket1", "socket0")} <= found


def test_a_copy_names_each_link_that_it_crosses():
    topology = switched((1, 1))
    [far] = [copy for copy in copies(topology) if (copy.begin, copy.end) == ("gpu0", "socket1")]
    assert [{link.a, link.b} for link in far.links] == [{"gpu0", "switch0"}, {"switch0", "socket0"},
                                                        {"socket0", "socket1"}]


def test_nvlink_and_the_switch_are_two_ways():
    kinds = [copy.links[0].kind for copy in between_gpus(dgx1(), "gpu0", "gpu1")]
    assert kinds == [LinkKind.NVLINK, LinkKind.PCIE]


def test_each_nvswitch_is_a_way():
    parts = [Part("socket0", PartKind.SOCKET), Part("gpu0", PartKind.GPU), Part("gpu1", PartKind.GPU),
             Part("nvswitch0", PartKind.NVSWITCH), Part("nvswitch1", PartKind.NVSWITCH)]
    links = [Link(f"gpu{gpu}", f"nvswitch{switch}", LinkKind.NVLINK, 25 * GIGA) for gpu in (0, 1) for switch in (0, 1)]
    topology = Topology("of two", tuple(parts), tuple(links))
    assert [copy.links[0].b for copy in between_gpus(topology, "gpu0", "gpu1")] == ["nvswitch0", "nvswitch1"]


@pytest.mark.parametrize(("kinds", "islands"), [
    ((), (("gpu0",), ("gpu1",), ("gpu2",), ("gpu3",), ("gpu4",))),
    ((PartKind.SWITCH,), (("gpu0", "gpu1"), ("gpu2", "gpu3", "gpu4"))),
    ((PartKind.NVSWITCH,), (("gpu0",), ("gpu1", "gpu2"), ("gpu3",), ("gpu4",))),
    ((PartKind.SWITCH, PartKind.NVSWITCH), (("gpu0", "gpu1", "gpu2", "gpu3", "gpu4"),)),
])
def test_islands(kinds, islands):
    assert islands_of(switched((2, 3), nvlinks=((1, 2),)), *kinds) == islands


def test_where_parts_hang():
    topology = dgx1()
    assert [switch_of(topology, name) for name in ("gpu3", "nic0")] == ["switch1", "switch0"]
    assert [socket_of(topology, name) for name in ("gpu3", "gpu4", "nic0")] == ["socket0", "socket1", "socket0"]
    assert switch_of(switched(), "nic0") is None


def test_what_hangs_nowhere_is_named():
    parts = Part("socket0", PartKind.SOCKET), Part("gpu0", PartKind.GPU)
    with pytest.raises(ConfigError, match="no path leads from gpu0 to a socket's memory in machine loose"):
        socket_of(Topology("loose", parts, ()), "gpu0")
