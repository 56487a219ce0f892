"""How two parts are joined, in nvidia-smi's words."""
from __future__ import annotations

import pytest

from bpsfast.hardware.topology.display import CONNECTION_WORDS, connection
from bpsfast.hardware.topology.graph import Link, LinkKind, Part, PartKind, Topology

PCIE, NVLINK = LinkKind.PCIE, LinkKind.NVLINK
MACHINE = Topology(
    "m",
    (*(Part(f"socket{number}", PartKind.SOCKET) for number in range(2)),
     *(Part(f"switch{number}", PartKind.SWITCH) for number in range(3)),
     *(Part(f"gpu{number}", PartKind.GPU) for number in range(7)),
     Part("nic0", PartKind.NIC), Part("nvswitch0", PartKind.NVSWITCH)),
    (Link("socket0", "socket1", LinkKind.SOCKETS, 9.0), Link("socket0", "switch0", PCIE, 8.0),
     Link("switch0", "switch1", PCIE, 7.0), Link("switch0", "gpu0", PCIE, 16.0), Link("switch0", "gpu1", PCIE, 15.0),
     Link("switch1", "gpu2", PCIE, 16.0), Link("socket0", "nic0", PCIE, 12.0), Link("socket1", "switch2", PCIE, 16.0),
     Link("switch2", "gpu3", PCIE, 16.0), Link("switch2", "gpu4", PCIE, 16.0), Link("gpu3", "gpu4", NVLINK, 50.0, 2),
     Link("gpu0", "nvswitch0", NVLINK, 150.0, 6), Link("gpu3", "nvswitch0", NVLINK, 100.0, 4),
     Link("gpu5", "gpu4", NVLINK, 25.0)))


@pytest.mark.parametrize(("one", "other", "word", "rate_bytes"), [
    ("gpu0", "gpu1", "PIX", 15.0), ("gpu0", "gpu2", "PXB", 7.0), ("gpu0", "nic0", "NODE", 8.0),
    ("gpu2", "nic0", "NODE", 7.0), ("gpu1", "gpu3", "SYS", 8.0), ("gpu3", "nic0", "SYS", 9.0),
    ("gpu3", "gpu4", "NV2", 50.0), ("gpu0", "gpu3", "NV4", 100.0), ("gpu5", "gpu4", "NV1", 25.0),
    # neither NVLink leads through a GPU, nor is there another way
    ("gpu3", "gpu5", "-", 0.0), ("gpu6", "gpu0", "-", 0.0)])
def test_words(one: str, other: str, word: str, rate_bytes: float) -> None:
    assert connection(MACHINE, one, other) == connection(MACHINE, other, one) == (word, rate_bytes)
    assert word == "-" or word in CONNECTION_WORDS or word.startswith("NV")
