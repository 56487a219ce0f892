"""The graph of recorded machines, also of those of which little can be found out."""
from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bpsfast.hardware.topology import discovery
from bpsfast.hardware.topology.copies import socket_of
from bpsfast.hardware.topology.graph import Link, LinkKind, PartKind, Topology, from_json, to_json
from bpsfast.orchestration.errors import ConfigError
from tests.sysfs_trees import INSIDES, NAMES
from tests.sysfs_trees.machine import Machine

Machines = Callable[[str], Machine]


def graph(machine: Machine) -> Topology:
    return discovery.discover(str(machine.root))


def above(topology: Topology, name: str) -> Link:
    """Return the PCIe link upward of a part: discovery puts the end above first."""
    (link,) = [link for link in topology.links if link.b == name and link.kind is LinkKind.PCIE]
    return link


def gen3_lanes(topology: Topology, name: str) -> float:
    """Return how many lanes of PCIe 3 are as fast as the link upward of a part."""
    return round(above(topology, name).rate_bytes / (8e9 * 128 / 130 / 8), 6)


def tree(topology: Topology) -> dict[str, str]:
    """Return what each part on PCIe hangs at."""
    return {link.b: link.a for link in topology.links if link.kind is LinkKind.PCIE}


@pytest.mark.parametrize("name", [*INSIDES, *NAMES])
def test_every_recorded_machine_has_a_graph_that_json_gives_back(name: str, recorded_machine: Machines) -> None:
    topology = graph(recorded_machine(name))
    assert from_json(to_json(topology)) == topology
    sockets = topology.of(PartKind.SOCKET)
    for part in topology.parts:
        if part.kind is not PartKind.NVSWITCH and part != sockets[0]:
            assert topology.path(part.name, sockets[0].name), part


def test_dgx1_has_four_switches_with_two_gpus_and_a_card_each(recorded_machine: Machines) -> None:
    topology = graph(recorded_machine("dgx1"))
    assert tree(topology) == {
        **{f"switch{number}": f"socket{number // 2}" for number in range(4)},
        **{f"gpu{number}": f"switch{number // 2}" for number in range(8)},
        **{f"nic{number}": f"switch{number}" for number in range(4)}}
    assert {gen3_lanes(topology, name) for name in tree(topology)} == {16}
    assert topology.name == "dgx1" and topology.part("socket1").cpus == "20-39,60-79"
    assert topology.part("nic0").wire_rate_bytes == 12.5e9 and topology.part("nic0").device == "mlx5_0"
    assert topology.part("switch0").model == "10b5:8764" and topology.part("switch0").address == "0000:03:00.0"
    assert topology.part("gpu7").address == "0000:8a:00.0" and topology.part("gpu7").device == "7"


def test_the_papers_machine_has_its_card_on_lanes_of_its_own(recorded_machine: Machines) -> None:
    topology = graph(recorded_machine("pcie_2x4"))
    assert tree(topology) == {"switch0": "socket0", "switch1": "socket1", "nic0": "socket0",
                              **{f"gpu{number}": f"switch{number // 4}" for number in range(8)}}
    # above 300 Gbit/s (OSDI'20, section 4.1)
    assert topology.path("socket0", "socket1")[0].rate_bytes * 8 > 300e9


def test_cards_of_a_machine_with_a_switch_for_each_gpu(recorded_machine: Machines) -> None:
    topology = graph(recorded_machine("hgx_h100"))
    assert tree(topology) == {
        **{f"switch{number}": f"socket{number // 4}" for number in range(8)},
        **{f"{kind}{number}": f"switch{number}" for number in range(8) for kind in ("gpu", "nic")}}
    assert gen3_lanes(topology, "switch3") == 64


def test_a_virtual_machine_has_all_at_the_first_socket(recorded_machine: Machines) -> None:
    topology = graph(recorded_machine("p3_16xlarge"))
    assert set(tree(topology).values()) == {"socket0"} and topology.of(PartKind.SWITCH) == ()
    assert len(topology.of(PartKind.GPU)) == 8 and len(topology.of(PartKind.SOCKET)) == 2
    assert gen3_lanes(topology, "gpu0") == 16
    assert topology.part("nic0").device == "ens3" and topology.part("nic0").wire_rate_bytes == 0.0


def test_three_gpus_share_a_switch_with_the_card_and_five_do_not(recorded_machine: Machines) -> None:
    topology = graph(recorded_machine("asymmetric_3_5"))
    assert tree(topology) == {"switch0": "socket0", "switch1": "socket1", "nic0": "switch0",
                              **{f"gpu{number}": f"switch{int(number > 2)}" for number in range(8)}}
    assert gen3_lanes(topology, "switch1") == 16  # 8 lanes of PCIe 4


def test_cards_are_numbered_by_address(recorded_machine: Machines) -> None:
    topology = graph(recorded_machine("cpu_two_socket"))
    assert [(nic.name, nic.device) for nic in topology.of(PartKind.NIC)] == [("nic0", "eno1"), ("nic1", "mlx5_0")]
    assert tree(topology) == {"nic0": "socket0", "nic1": "socket1"} and topology.of(PartKind.GPU) == ()


def test_gpus_that_nvml_does_not_list_are_another_containers(recorded_machine: Machines) -> None:
    machine = recorded_machine("dgx1")
    mine = machine.answers["nvml"]["gpus"][2:4]
    topology = graph(machine.answer(nvml={"gpus": mine}))
    assert {gpu.device: gpu.address for gpu in topology.of(PartKind.GPU)} == {"2": "0000:0a:00.0", "3": "0000:0b:00.0"}
    assert len(topology.of(PartKind.SWITCH)) == 1  # the others have one card below them
    assert [(link.a, link.b, link.n_links) for link in topology.links if link.kind is LinkKind.NVLINK] == [
        ("gpu0", "gpu1", 2)]


def test_without_nvml_gpus_have_numbers_for_names_and_no_nvlinks(recorded_machine: Machines) -> None:
    topology = graph(recorded_machine("dgx1").answer(nvml=None))
    assert len(topology.of(PartKind.GPU)) == 8 and topology.part("gpu0").model == "10de:1db1"
    assert topology.part("gpu0").device == "" and not [link for link in topology.links if link.kind is LinkKind.NVLINK]


def test_amds_gpus_are_gpus_and_a_boards_own_display_is_none(recorded_machine: Machines) -> None:
    machine = recorded_machine("pcie_2x4").answer(nvml=None)
    port = "sys/devices/pci0000:80/0000:80:02.0/0000:81:00.0/0000:82"
    machine.write(f"{port}:04.0/0000:83:00.0/vendor", "0x1002").write(f"{port}:04.0/0000:83:00.0/class", "0x120000")
    machine.write(f"{port}:08.0/0000:84:00.0/class", "0x120000")  # NVIDIA has none of this class
    addresses = [gpu.address for gpu in graph(machine).of(PartKind.GPU)]
    assert len(addresses) == 7 and "0000:83:00.0" in addresses and "0000:84:00.0" not in addresses
    assert "0000:0b:00.0" not in addresses


def test_two_devices_in_one_slot_both_hang_there(recorded_machine: Machines) -> None:
    """Functions of a GPU that is shared out, and what a virtual machine was given as functions of one device."""
    machine = recorded_machine("pcie_2x4").answer(nvml=None)
    link = machine.root / "sys/bus/pci/devices/0000:84:00.0"
    second = link.resolve().with_suffix(".4")
    shutil.copytree(link.resolve(), second, symlinks=True)
    link.with_suffix(".4").symlink_to(second)
    topology = graph(machine)
    gpus = {part.address: part.name for part in topology.of(PartKind.GPU)}
    assert len(gpus) == 9
    assert len({(above(topology, gpus[f"0000:84:00.{each}"]).a, above(topology, gpus[f"0000:84:00.{each}"]).rate_bytes)
                for each in (0, 4)}) == 1
    assert all(socket_of(topology, name) for name in gpus.values())


def test_a_container_without_sys_has_the_gpus_that_nvml_lists(recorded_machine: Machines) -> None:
    machine = recorded_machine("dgx1").remove("sys").write("proc/self/status", "Cpus_allowed_list:\t0-7")
    topology = graph(machine)
    assert [part.cpus for part in topology.of(PartKind.SOCKET)] == ["0-7"] and len(topology.of(PartKind.GPU)) == 8
    assert set(tree(topology).values()) == {"socket0"} and topology.path("gpu0", "gpu3", LinkKind.NVLINK)


def test_a_machine_of_which_nothing_is_known_is_a_socket(tmp_path: Path) -> None:
    topology = discovery.discover(str(tmp_path))
    assert [part.name for part in topology.parts] == ["socket0"] and topology.links == ()
    assert topology.name == "this machine"


def test_this_machine_has_a_graph() -> None:
    topology = discovery.discover()
    assert topology.of(PartKind.SOCKET) and topology.of(PartKind.SOCKET)[0].cpus


def test_what_is_no_recorded_machine_is_refused(recorded_machine: Machines, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        discovery.discover(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="what NVML said on the recorded machine cannot be read"):
        graph(recorded_machine("dgx1").answer(nvml={"gpus": [{"index": 0}]}))
