"""The paper's machines match its figures."""
from __future__ import annotations

from bpsfast.bench.paper import machines, osdi20
from bpsfast.hardware.topology.copies import islands_of, switch_of
from bpsfast.hardware.topology.display import connection
from bpsfast.hardware.topology.graph import LinkKind, PartKind


def test_pcie_only() -> None:
    found = machines.pcie_only()
    assert islands_of(found, PartKind.SWITCH) == (("gpu0", "gpu1", "gpu2", "gpu3"), ("gpu4", "gpu5", "gpu6", "gpu7"))
    assert connection(found, "gpu0", "gpu1") == ("PIX", osdi20.PCIE_RATE)
    assert connection(found, "gpu0", "gpu4") == ("SYS", osdi20.CROSS_SWITCH_RATE) and switch_of(found, "nic0") is None


def test_nvlink() -> None:
    found = machines.nvlink()
    assert len(islands_of(found, PartKind.NVSWITCH)) == 1 and len(found.of(PartKind.SWITCH)) == 4
    for gpu in found.of(PartKind.GPU):
        assert sum(link.rate_bytes for _, link in found.neighbours(gpu.name, LinkKind.NVLINK)) == 1.2e12 / 8
    assert connection(found, "nic0", "gpu1").word == "PIX" and connection(found, "nic0", "gpu2").word == "NODE"
