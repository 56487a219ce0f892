"""Checks RD11 and RD21 of ``bpsfast doctor``: PCIe link, NUMA node and IOMMU of a network card; cores' shared cache."""
from __future__ import annotations

import os

from ...base.value_formats import parse_cpus
from ...hardware.host import Host
from ...hardware.numa import siblings
from ...hardware.rdma_devices import RdmaDevice
from ...pyx.perf import handover_ns
from .facts import CacheLineLatency, Facts
from .finding import Check, Outcome, Severity, advice, passed, skipped, warned

#: share of a PCIe link's rate left for payload after packet headers, with the usual 256 bytes a packet
_PAYLOAD = 0.88


def place(facts: Facts) -> Outcome:
    """RD11: check that the network card can run at its port's rate from this process."""
    cards = [device for device in facts.host.devices if device.pcie is not None or device.numa_node is not None]
    if not cards:
        return skipped("no RDMA device is a PCIe card")
    used = {rail.device for rail in facts.choice.rails}
    narrow = [(device, words) for device in cards if (words := _narrow(device))]
    remote = facts.host.numa.keys() - facts.host.own_numa
    far = [device for device in cards if device.name in used and device.numa_node in remote
           and facts.host.numa[device.numa_node].cpus]
    if len(far) < len(used):  # a node that uses several cards is far from some of them
        far = []
    own = "node " + ", ".join(map(str, sorted(facts.host.own_numa))) if facts.host.own_numa else "none known"
    lines = [words for _, words in narrow]
    lines += [f"{device.name} is on NUMA node {device.numa_node}, this process runs on {own}" for device in far]
    if not lines:
        return passed("\n".join(map(_shown, cards)))
    actions = {}
    if far:
        actions["job"] = f"numactl --cpunodebind={far[0].numa_node} --membind={far[0].numa_node} bpsfast run ..."
    if narrow:
        address = next(device.pcie.address for device, _ in narrow if device.pcie)
        actions["host"] = "move the card to a slot with all lanes, or check bifurcation in the BIOS"
        actions["check"] = f"sudo lspci -vv -s {address} | grep -E 'LnkCap|LnkSta'"
    if _translates(facts):
        lines.append("the IOMMU translates addresses of the card (no iommu=pt): registrations cost more, and GPU peers "
                     "are slow")
        actions["kernel"] = "add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX), then boot again"
    return warned("\n".join(lines), **actions)


def _narrow(device: RdmaDevice) -> str:
    """Return why the PCIe link is slower than both the card's maximum and its ports' rate; "" if it is not."""
    link = device.pcie
    if link is None or not link.degraded:
        return ""
    needed = sum(port.rate_gbps or 0.0 for port in device.ports if port.is_active)
    if link.gbps * _PAYLOAD >= needed:
        return ""
    parts = []
    if link.width < link.max_width:
        parts.append(f"x{link.width} of x{link.max_width}")
    if link.speed < link.max_speed:
        parts.append(f"{link.speed:g} of {link.max_speed:g} GT/s")
    return (f"{device.name} runs at {', '.join(parts)}: at most about {link.gbps * _PAYLOAD:.0f} Gb/s, the port has "
            f"{needed:g}")


def _shown(device: RdmaDevice) -> str:
    link = f" PCIe {device.pcie}" if device.pcie else ""
    node = "" if device.numa_node is None else f" NUMA node {device.numa_node}"
    return f"{device.name}{link}{node}"


def _translates(facts: Facts) -> bool:
    """Tell whether the IOMMU translates addresses of cards."""
    words = (facts.host.tree.text("proc/cmdline") or "").split()
    return bool(facts.host.tree.names("sys/kernel/iommu_groups")) and not {"iommu=pt", "iommu.passthrough=1"} & {*words}

#: A line takes 20 to 80 ns within a shared cache, and 100 or more between chiplets or sockets.
_MOST_NS = 100.0
#: Cores that are measured against the first one; each takes a millisecond.
_MOST_CORES = 15


def measure(host: Host) -> CacheLineLatency:
    """Measure between cores of this machine that share the last level of cache according to the kernel."""
    cores = sharers(host, frozenset(os.sched_getaffinity(0)))
    if len(cores) < 2:
        return CacheLineLatency(error="no two usable cores share a cache according to the kernel")
    first, *others = cores[:_MOST_CORES + 1]
    return max((again(CacheLineLatency(first, other)) for other in others),
               key=lambda found: (not found.error, found.ns))


def again(before: CacheLineLatency) -> CacheLineLatency:
    """Repeat the measurement of *before*, if it has cores."""
    if before.first < 0:
        return before
    try:
        return CacheLineLatency(before.first, before.second, handover_ns(before.first, before.second))
    except OSError as exc:
        return CacheLineLatency(before.first, before.second, error=exc.strerror or str(exc))


def differ(first_ns: float, second_ns: float) -> bool:
    """Tell whether cores shared a cache in one of two measurements only; 0 ns is unknown."""
    return bool(first_ns and second_ns) and (first_ns <= _MOST_NS) != (second_ns <= _MOST_NS)


def sharers(host: Host, usable: frozenset[int]) -> list[int]:
    """Return one CPU of each core in the largest subset of *usable* that shares the last level of cache, or []."""
    groups = dict.fromkeys(parse_cpus(_last_cache(host, cpu, "shared_cpu_list")) & usable for cpu in sorted(usable))
    return max((sorted({min(siblings(host.tree, cpu) & cpus, default=cpu) for cpu in cpus}) for cpus in groups),
               key=len, default=[])


def shared_cache(facts: Facts) -> Outcome:
    """RD21: check that cores that share a cache exchange cache lines at its speed."""
    found = facts.cache_latency
    if found is None:
        return skipped("nobody has measured it")
    if found.error:
        return skipped(found.error)
    level = _last_cache(facts.host, found.first, "level") or "?"
    pair = f"CPUs {found.first} and {found.second}"
    took = f"a cache line takes {found.ns:.0f} ns from one to the other"
    if found.ns <= _MOST_NS:
        return passed(f"{pair} share an L{level} cache: {took}")
    return warned(f"{pair} share an L{level} cache according to the kernel, but {took}: the host of this virtual "
                  "machine now runs them on different chips, and sums of local ranks take twice as long",
                  host="on the host of the virtual machine: virsh vcpupin NAME 0 CPU   # all to cores of one L3",
                  check="bpsfast doctor   # again in a minute: where CPUs are not pinned it changes")


def _last_cache(host: Host, cpu: int, name: str) -> str:
    """Return a property of the largest cache of *cpu* from sysfs; "" if there is none."""
    place = f"sys/devices/system/cpu/cpu{cpu}/cache"
    levels = [(int(host.tree.text(f"{place}/{index}/level") or 0), index)
              for index in host.tree.names(place) if index.startswith("index")]
    return host.tree.text(f"{place}/{max(levels)[1]}/{name}") or "" if levels else ""


CHECKS = (
    Check("RD11", "PCIe and NUMA", Severity.SLOW,
          ("half the bandwidth that was expected", "perftest is fast on one socket and slow on the other"),
          "The card runs with fewer lanes than it has, is at the other socket, or is behind an IOMMU.",
          "Bandwidth stops at the PCIe link's rate; memory traffic crosses the sockets.",
          "bytedance/byteps#250, NVIDIA/nccl#2409", place,
          advice(job="numactl --cpunodebind=N --membind=N bpsfast run ...",
                 kernel="iommu=pt; for GPU peers also ACS off on the bridges (see the GPU vendor's guide)",
                 check="bpsfast devices; sudo lspci -vv -s ADDRESS | grep -E 'LnkCap|LnkSta'"), "device"),
    Check("RD21", "shared cache", Severity.SLOW,
          ("a job is twice as slow as yesterday, on the same virtual machine", "benchmarks have two modes"),
          "A virtual machine's CPUs are threads of its host, which moves them between chips, or parts of a chip "
          "that have a cache each, while the guest's kernel still reports that they share one.",
          "Data that one rank wrote is read from memory, or across the host's interconnect, by another.",
          "two CPUs that were 40 ns apart for minutes, then 200, while exchanges of 4 MiB fell from 12 to 5 GB/s",
          shared_cache,
          advice(host="on the host of the virtual machine: virsh vcpupin NAME 0 CPU",
                 check="bpsfast doctor; cat /sys/devices/system/cpu/cpu*/cache/index3/shared_cpu_list")),
)
