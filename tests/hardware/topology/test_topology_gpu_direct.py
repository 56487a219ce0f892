"""Which GPUs can copy straight to a card, and the words for why others cannot."""
from __future__ import annotations

import pytest
from hypothesis import given, settings

from bpsfast.base.settings import Settings
from bpsfast.hardware.topology.copies import (
    GpuNicPair,
    direct_pairs,
    direct_refusal,
    enabled_pairs,
    gpu_nic_pairs,
    refusal_reasons,
    switch_of,
)
from bpsfast.hardware.topology.discovery import discover
from bpsfast.hardware.topology.display import connection
from bpsfast.hardware.topology.graph import Link, LinkKind, Part, PartKind, Topology
from bpsfast.orchestration.errors import ConfigError
from tests.hardware.topology.test_topology_strategies import machines
from tests.support.gpu_machines import GIGA, dgx1, switched


def reasons(topology):
    return {pair.gpu: pair.reason for pair in gpu_nic_pairs(topology)}


def test_below_the_cards_switch_and_elsewhere():
    found = reasons(dgx1())
    assert found["gpu0"] == found["gpu1"] == ""
    assert direct_pairs(dgx1()) == (GpuNicPair("gpu0", "nic0"), GpuNicPair("gpu1", "nic0"))
    assert found["gpu2"] == ("it and nic0 are below different PCIe switches, and the path crosses the root complex of "
                             "socket0")
    assert found["gpu7"] == "the path to nic0 crosses the root complexes of socket0 and socket1"


def test_a_card_at_a_socket():
    assert reasons(switched((1,), (0,)))["gpu0"] == (
        "it and nic0 are not below one PCIe switch, and the path crosses the root complex of socket0")


def test_a_switch_below_a_switch_is_another_one():
    parts = [Part("socket0", PartKind.SOCKET), *(Part(f"switch{n}", PartKind.SWITCH) for n in range(2)),
             Part("gpu0", PartKind.GPU), Part("nic0", PartKind.NIC)]
    ends = [("socket0", "switch0"), ("switch0", "switch1"), ("switch1", "gpu0"), ("switch0", "nic0")]
    topology = Topology("nested", tuple(parts), tuple(Link(*each, LinkKind.PCIE, 16 * GIGA) for each in ends))
    assert reasons(topology) == {"gpu0": "it and nic0 are below different PCIe switches"}


def test_no_card_and_an_unknown_way():
    without = list(gpu_nic_pairs(switched((1,), (0,), card_at=None)))
    assert without == [GpuNicPair("gpu0", "", "the machine has no network card")]
    topology = switched((1,), (0,), card_at=None)
    lone = Topology("lone", (*topology.parts, Part("nic0", PartKind.NIC)), topology.links)
    assert reasons(lone) == {"gpu0": "there is no known path to nic0"}
    assert refusal_reasons(lone) == [("gpu0", "there is no known path to nic0")]


def test_of_several_cards_the_nearest_is_named():
    base = dgx1()
    topology = Topology("two", (*base.parts, Part("nic1", PartKind.NIC)),
                        (*base.links, Link("nic1", "switch3", LinkKind.PCIE, 16 * GIGA)))
    told = dict(refusal_reasons(topology))
    assert told.keys() == {"gpu2", "gpu3", "gpu4", "gpu5"} and "nic1" in told["gpu4"] and "nic0" in told["gpu3"]


def test_with_a_card_for_each_gpu_all_can(recorded_machine):
    topology = discover(str(recorded_machine("hgx_h100").root))
    assert {pair.gpu for pair in direct_pairs(topology)} == {f"gpu{n}" for n in range(8)}
    assert refusal_reasons(topology) == []


@given(machines())
@settings(max_examples=60, deadline=None)
def test_it_is_one_switch_or_a_reason(topology):
    found = list(gpu_nic_pairs(topology))
    assert len(found) == len(topology.of(PartKind.GPU)) * max(1, len(topology.of(PartKind.NIC)))
    for pair in found:
        if pair.reason:
            assert not pair.card or connection(topology, pair.gpu, pair.card).word != "PIX"
        else:
            assert switch_of(topology, pair.gpu) == switch_of(topology, pair.card) is not None
    assert {gpu for gpu, _ in refusal_reasons(topology)} == {pair.gpu for pair in found} - {
        pair.gpu for pair in direct_pairs(topology)}


def test_it_is_off_unless_asked_for():
    assert enabled_pairs(dgx1(), Settings()) == ()
    assert enabled_pairs(dgx1(), Settings(gpu_direct=True)) == direct_pairs(dgx1())
    assert enabled_pairs(switched((), (0,)), Settings(gpu_direct=True)) == ()


def test_asked_for_where_no_gpu_can_it_is_refused_with_the_reason_and_what_to_do():
    with pytest.raises(ConfigError, match=r"BPSFAST_GPU_DIRECT = 1: no GPU of machine by formula.*\(gpu0: it and nic0 "
                                          r"are not below one PCIe switch.*another slot.*or unset it"):
        enabled_pairs(switched(), Settings(gpu_direct=True))


def test_a_gpu_and_the_cards_of_a_job():
    """All cards that a job uses have to be below the GPU's switch; a card may have several functions."""
    parts = [Part("socket0", PartKind.SOCKET), *(Part(f"switch{n}", PartKind.SWITCH) for n in range(2)),
             Part("gpu0", PartKind.GPU, "0000:3B:00.0"), Part("nic0", PartKind.NIC, device="mlx5_0,mlx5_1"),
             Part("nic1", PartKind.NIC, device="mlx5_2")]
    ends = [("socket0", "switch0"), ("socket0", "switch1"), ("switch0", "gpu0"), ("switch0", "nic0"),
            ("switch1", "nic1")]
    topology = Topology("two", tuple(parts), tuple(Link(*each, LinkKind.PCIE, 16 * GIGA) for each in ends))
    assert direct_refusal(topology, "0000:3b:00.0", ["mlx5_1", "mlx5_0"]) == ""
    reason = direct_refusal(topology, "0000:3b:00.0", ["mlx5_0", "mlx5_2"])
    assert reason.startswith("gpu0 (0000:3b:00.0) cannot copy directly to mlx5_2: it and nic1 are below different PCIe")
    assert "rxe0 is no card" in direct_refusal(topology, "0000:3b:00.0", ["rxe0"])
    assert "not among those that sysfs shows" in direct_refusal(topology, "0000:5e:00.0", ["mlx5_0"])
