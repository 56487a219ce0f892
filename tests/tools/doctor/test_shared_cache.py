"""RD21: who is said to share a cache, what is measured between them, and what the doctor says of it."""
from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from bpsfast.hardware.host import Host
from bpsfast.pyx.perf import handover_ns
from bpsfast.tools.doctor import hardware
from bpsfast.tools.doctor.facts import CacheLineLatency
from bpsfast.tools.doctor.finding import Status
from tests.sysfs_trees.machine import Machine, commands


def cached(machine: Machine, shared: str, cpus: int = 8) -> Machine:
    """Give each of the first *cpus* CPUs an L2 of its own, and the L3 that *shared* says."""
    for cpu in range(cpus):
        place = f"sys/devices/system/cpu/cpu{cpu}"
        for index, level, sharers in ((2, 2, str(cpu)), (3, 3, shared)):
            machine.write(f"{place}/cache/index{index}/level", str(level))
            machine.write(f"{place}/cache/index{index}/shared_cpu_list", sharers)
        machine.write(f"{place}/topology/thread_siblings_list", f"{cpu % (cpus // 2)},{cpu % (cpus // 2) + cpus // 2}")
    return machine


@pytest.mark.parametrize(("usable", "cores"), [(range(8), [0, 1, 2, 3]), ((1, 5, 6), [1, 6]), ((2,), [2])])
def test_one_cpu_of_each_core_that_shares_the_last_cache(usable: tuple[int, ...], cores: list[int],
                                                         recorded_machine: Callable[[str], Machine]) -> None:
    host = cached(recorded_machine("none"), "0-7").host
    assert hardware.sharers(host, frozenset(usable)) == cores


def test_the_largest_set_counts(recorded_machine: Callable[[str], Machine]) -> None:
    machine = cached(recorded_machine("none"), "0,4", 8)
    for cpu in (1, 2, 5, 6):
        machine.write(f"sys/devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list", "1,2,5,6")
    assert hardware.sharers(machine.host, frozenset(range(8))) == [1, 2]
    assert hardware.sharers(recorded_machine("none").host, frozenset()) == []


def test_a_kernel_that_says_nothing_of_caches(recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("none")
    if (machine.root / "sys/devices/system/cpu/cpu0/cache").exists():
        machine.remove("sys/devices/system/cpu/cpu0/cache")
    found = hardware.measure(machine.host)
    assert "no two usable cores" in found.error


@pytest.mark.parametrize(("ns", "status", "words"), [
    (41.0, Status.PASS, "CPUs 0 and 3 share an L3 cache: a cache line takes 41 ns"),
    (205.0, Status.WARN, "CPUs 0 and 3 share an L3 cache according to the kernel, but a cache line takes 205 ns"),
])
def test_what_the_doctor_says(ns: float, status: Status, words: str,
                              recorded_machine: Callable[[str], Machine]) -> None:
    facts = cached(recorded_machine("none"), "0-7").facts()
    facts.cache_latency = CacheLineLatency(0, 3, ns)
    found = hardware.shared_cache(facts)
    assert found.status is status and words in found.found
    assert ("vcpupin" in commands(found).get("host", "")) == (status is Status.WARN)


def test_what_was_not_measured_is_skipped(recorded_machine: Callable[[str], Machine]) -> None:
    facts = recorded_machine("none").facts()
    assert hardware.shared_cache(facts).status is Status.SKIP
    facts.cache_latency = CacheLineLatency(error="CPU 3 is busy")
    found = hardware.shared_cache(facts)
    assert (found.status, found.found) == (Status.SKIP, "CPU 3 is busy")


def test_this_machine() -> None:
    before = os.sched_getaffinity(0)
    found = hardware.measure(Host())
    assert found.error or (0 < found.ns < 1e6 and found.first < found.second), found
    again = hardware.again(found)
    assert (again.first, again.second) == (found.first, found.second) and (found.error or again.error or again.ns > 0)
    assert os.sched_getaffinity(0) == before
    assert "1023" in hardware.again(CacheLineLatency(0, 1023, 40.0)).error


def test_the_farthest_that_could_be_measured(recorded_machine: Callable[[str], Machine],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    took = {3: 60.0, 2: 40.0}

    def handover(first: int, second: int) -> float:
        if second not in took:
            raise OSError(errno.ETIMEDOUT, "busy")
        return took[second]

    monkeypatch.setattr(hardware, "sharers", lambda host, usable: [1, 2, 3, 4])
    monkeypatch.setattr(hardware, "handover_ns", handover)
    host = recorded_machine("none").host
    assert hardware.measure(host) == CacheLineLatency(1, 3, 60.0)
    took.clear()
    assert hardware.measure(host).error == "busy" and hardware.again(hardware.measure(host)).error == "busy"
    took[2] = 50.0
    assert hardware.again(CacheLineLatency(1, 2, error="busy")) == CacheLineLatency(1, 2, 50.0)
    assert hardware.again(CacheLineLatency(error="alone")) == CacheLineLatency(error="alone")


def test_measurements_that_differ() -> None:
    assert hardware.differ(40.0, 190.0) and hardware.differ(190.0, 40.0)
    assert not any(hardware.differ(*ns) for ns in ((40.0, 60.0), (150.0, 190.0), (0.0, 190.0), (40.0, 0.0)))


def test_a_cpu_that_may_not_be_used() -> None:
    with pytest.raises(OSError, match="between CPUs 0 and 1023"):
        handover_ns(0, 1023)
    with pytest.raises(ValueError, match="between two CPUs, not from 2 to 2"):
        handover_ns(2, 2)


def test_an_end_in_time() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("this process may use one CPU only")
    with pytest.raises(OSError, match=r"CPUs \d+ and \d+ are busy: .* in 0 s"):
        handover_ns(cpus[0], cpus[1], 0.0)
