"""Cores of a thread beside its device: what the setting means on a recorded machine, and that threads inherit it."""
from __future__ import annotations

import os
import threading

import pytest

from bpsfast.hardware.affinity.binding import device_cores, on_cores
from bpsfast.hardware.host import Host
from bpsfast.orchestration.errors import ConfigError
from tests.sysfs_trees.machine import Machine


@pytest.fixture
def machine(tmp_path):
    return Machine("mlx5_roce", tmp_path).host


def test_the_setting_names_cores_or_the_device_s_numa_node(machine):
    near, far = (next(each for each in machine.devices if each.numa_node == number) for number in (0, 1))
    assert device_cores(machine, near.name, "") == frozenset()
    assert device_cores(machine, near.name, "numa") == {*range(16), *range(32, 48)}
    assert device_cores(machine, near.name, "1-2") == {1, 2}
    # where the kernel does not say, and where this process may not run
    assert device_cores(machine, "absent", "numa") == device_cores(machine, far.name, "numa") == frozenset()
    # a process that keeps to less by itself may still run there
    assert device_cores(machine, near.name, "20", frozenset(range(64))) == {20}
    with pytest.raises(ConfigError, match="rdma_cores=9999: this process may run on none of them"):
        device_cores(machine, near.name, "9999")


def test_a_thread_started_meanwhile_stays_there_and_its_starter_does_not():
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    found = []
    go = threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(10), found.append(os.sched_getaffinity(0))))
    with on_cores(one):
        thread.start()
        assert os.sched_getaffinity(0) == one
    go.set()
    thread.join(10)
    assert found == [one] and os.sched_getaffinity(0) == before
    with on_cores(frozenset()):
        assert os.sched_getaffinity(0) == before
    assert device_cores(Host(), "absent", str(min(before))) == one
