"""NUMA nodes of cards and GPUs, and what a rank's environment says of GPUs and of threads that are bound."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.base import settings
from bpsfast.hardware.affinity import binding, locality, plan
from bpsfast.hardware.affinity.locality import NicLocality
from tests.sysfs_trees.machine import Machine

Machines = Callable[[str], Machine]


def cards(machine: Machine, address: str, **values: object) -> NicLocality:
    return locality.traffic_nics(machine.host, settings.load_with_origins(values, {})[0], address)


def test_rdma_ports_count_then_the_interface_with_the_address(recorded_machine: Machines) -> None:
    machine = recorded_machine("infiniband")
    device = machine.host.devices[0]
    address = next(str(netdev.addresses[0].ip) for netdev in machine.host.netdevs.values() if netdev.addresses)
    assert cards(machine, address) == NicLocality((device.name,), frozenset({device.numa_node}))
    assert not set(cards(machine, address, transport="tcp").names) & {each.name for each in machine.host.devices}
    assert cards(machine, "127.0.0.1") == NicLocality(), "what goes to oneself goes through no card"
    assert cards(machine, "192.0.2.77", transport="tcp") == NicLocality(), "nobody's address"
    assert cards(machine, address, rdma_devices="nothing") == cards(machine, address, transport="tcp")


def test_what_stands_on_cards_has_their_nodes(recorded_machine: Machines) -> None:
    machine = recorded_machine("cpu_two_socket").answer(addresses={"vlan7": ["10.0.0.7/24"]})
    for name, lowers in (("vlan7", ["bond0"]), ("bond0", ["eno1", "ens7f0", "vlan7"])):
        machine.write(f"sys/class/net/{name}/ifindex", "9")
        for lower in lowers:
            machine.write(f"sys/class/net/{name}/lower_{lower}/ifindex", "1")
    (machine.root / "sys/class/net/ens7f0/device/driver").unlink()
    assert cards(machine, "10.0.0.7") == NicLocality(("eno1", "ens7f0"), frozenset({0, 1}))
    assert locality.nics_by_name(machine.host, ["mlx5_0"]) == NicLocality(("mlx5_0",), frozenset({1}))
    assert locality.fastest_nics(machine.host) == NicLocality(("mlx5_0",), frozenset({1}))
    assert locality.fastest_nics(recorded_machine("none").host).nodes == frozenset()


def test_gpus_without_a_known_node(recorded_machine: Machines) -> None:
    machine = recorded_machine("pcie_2x4")
    assert locality.gpu_numa_nodes(machine.host) == (0, 0, 0, 0, 1, 1, 1, 1)
    for place in (machine.root / "sys/devices").rglob("numa_node"):
        place.write_text("-1\n")
    assert locality.gpu_numa_nodes(machine.host) == (None,) * 8


def test_cores_of_a_kernel_without_numa(recorded_machine: Machines) -> None:
    machine = recorded_machine("none").remove("sys/devices/system").allow("0-1")
    assert plan.read_cores(machine.host.tree) == plan.Cores({0: (frozenset({0}), frozenset({1}))}, {0: {}})
    threads = recorded_machine("infiniband").hyperthreads()
    assert plan.read_cores(threads.host.tree).count == 32
    assert plan.read_cores(threads.host.tree, whole=False).count == 64


@pytest.mark.parametrize(("environ", "binder"), [
    ({}, ""), ({"OMP_PROC_BIND": "close"}, "OMP_PROC_BIND"), ({"OMP_PROC_BIND": "False"}, ""),
    ({"OMP_PLACES": "cores"}, "OMP_PLACES"), ({"GOMP_CPU_AFFINITY": "0-3"}, "GOMP_CPU_AFFINITY"),
    ({"KMP_AFFINITY": "granularity=fine,compact,1,0"}, "KMP_AFFINITY"), ({"KMP_AFFINITY": "verbose,none"}, ""),
    ({"KMP_AFFINITY": ""}, ""), ({"OMP_NUM_THREADS": "4"}, "")])
def test_who_binds_threads(environ: dict[str, str], binder: str) -> None:
    assert binding.binding_variable(environ) == binder


@pytest.mark.parametrize(("environ", "gpu"), [
    ({}, 2), ({"CUDA_VISIBLE_DEVICES": "5"}, 5), ({"CUDA_VISIBLE_DEVICES": "7,6,5,4"}, 5),
    ({"CUDA_VISIBLE_DEVICES": ""}, -1), ({"CUDA_VISIBLE_DEVICES": "-1"}, -1), ({"CUDA_VISIBLE_DEVICES": "1,2"}, -1),
    ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, -1), ({"HIP_VISIBLE_DEVICES": "3"}, 3)])
def test_the_gpu_of_local_rank_2(environ: dict[str, str], gpu: int) -> None:
    assert binding.default_gpu(environ, 2) == gpu
