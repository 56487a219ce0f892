"""RD11: where the card sits: its PCIe link, its NUMA node, the IOMMU before it."""
from __future__ import annotations

from ...hardware.rdma_devices import RdmaDevice
from .facts import Facts
from .finding import Check, Outcome, Severity, advice, passed, skipped, warned

#: share of a PCIe link's rate that is left for payload after packet headers, at the usual 256 bytes a packet
_PAYLOAD = 0.88


def place(facts: Facts) -> Outcome:
    """RD11: can the card run at its port's rate from this process?"""
    if not facts.host.devices:
        return skipped("no RDMA device")
    cards = [device for device in facts.host.devices if device.pcie is not None or device.numa_node is not None]
    if not cards:
        return skipped("no RDMA device is a PCIe card")
    used = {device.name for device, _ in facts.used}
    narrow = [words for device in cards if (words := _narrow(device))]
    with_cpus = {number for number, node in facts.host.numa.items() if node.cpus}  # nobody can run elsewhere
    far = [device for device in cards if device.name in used and device.numa_node in with_cpus - facts.host.own_numa]
    lines = narrow + [f"{device.name} is on NUMA node {device.numa_node}, this process runs on "
                      f"{_listed(facts.host.own_numa)}" for device in far]
    if not lines:
        return passed("\n".join(map(_shown, cards)))
    actions = {}
    if far:
        actions["job"] = f"numactl --cpunodebind={far[0].numa_node} --membind={far[0].numa_node} bpsfast run ..."
    if narrow:
        address = next(device.pcie.address for device in cards if device.pcie and _narrow(device))
        actions["host"] = "move the card to a slot with all its lanes, or look into the BIOS for bifurcation"
        actions["check"] = f"sudo lspci -vv -s {address} | grep -E 'LnkCap|LnkSta'"
    if _translates(facts):
        lines.append("the IOMMU translates for the card (no iommu=pt): each registration costs more, GPU peers suffer")
        actions["kernel"] = "add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX), then boot again"
    return warned("\n".join(lines), **actions)


CHECKS = (
    Check("RD11", "PCIe and NUMA", Severity.SLOW,
          ("half the bandwidth that was expected", "perftest is fast on one socket and slow on the other"),
          "The card runs with fewer lanes than it has, or sits at the other socket, or an IOMMU stands before it.",
          "Bandwidth stops at the PCIe link's rate; memory traffic crosses the sockets.",
          "bytedance/byteps#250, NVIDIA/nccl#2409", place,
          advice(job="numactl --cpunodebind=N --membind=N bpsfast run ...",
                 kernel="iommu=pt; for GPU peers also ACS off on the bridges (see the GPU vendor's guide)",
                 check="bpsfast devices; sudo lspci -vv -s ADDRESS | grep -E 'LnkCap|LnkSta'")),
)


def _narrow(device: RdmaDevice) -> str:
    """Return what is wrong with the card's link: below what the card can do *and* what its ports need; "" if fine."""
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


def _listed(nodes: frozenset[int]) -> str:
    return "node " + ", ".join(map(str, sorted(nodes))) if nodes else "none known"


def _translates(facts: Facts) -> bool:
    words = (facts.host.tree.text("proc/cmdline") or "").split()
    return bool(facts.host.tree.names("sys/kernel/iommu_groups")) and "iommu=pt" not in words \
        and "iommu.passthrough=1" not in words
