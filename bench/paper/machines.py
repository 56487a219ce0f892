"""The two machine types that OSDI'20 measures (figures 6 and 8), each with one NIC of 100 Gbit/s.

Rates are the authors' measurements where they print them. Copies between GPUs of one switch get 105 Gbit/s, those
between two switches 80 (figure 7); so a link between switch and socket has 80 for all of its traffic. No rate has been
published for two transfers at once. A card that has such a link to itself gets 90 (section 6.2).
"""
from __future__ import annotations

from collections.abc import Sequence

from bpsfast.hardware.topology.graph import Link, LinkKind, Part, PartKind, Topology

from . import osdi20

#: PCIe 3 with 16 lanes: a card's slot, which is faster than its network link.
_SLOT_RATE = 128e9 / 8
#: Link between processors: more than 300 Gbit/s (section 4.1).
_SOCKETS_RATE = 300e9 / 8
#: NVLink of a pair of GPUs: 1.2 Tbit/s for each GPU (section 4.2), over four neighbours.
_NVLINK_RATE = 1.2e12 / 8 / 4
#: Pairs of GPUs that NVLink connects: two squares with diagonals, connected corner to corner.
_NVLINKS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (4, 5), (4, 6), (4, 7), (5, 6), (5, 7), (6, 7),
            (0, 4), (1, 5), (2, 6), (3, 7))


def pcie_only() -> Topology:
    """Return figure 6: two sockets, each with a switch of four GPUs; the card at the first socket."""
    return _switched("PCIe", sockets=(0, 1), gpus_per_switch=4, card_at="socket0")


def nvlink() -> Topology:
    """Return figure 8: two sockets, each with two switches of two GPUs; NVLinks; the card below the first switch."""
    return _switched("NVLink", sockets=(0, 0, 1, 1), gpus_per_switch=2, card_at="switch0", nvlinks=_NVLINKS)


def _switched(name: str, sockets: Sequence[int], gpus_per_switch: int, card_at: str,
              nvlinks: Sequence[tuple[int, int]] = ()) -> Topology:
    parts = [Part("socket0", PartKind.SOCKET), Part("socket1", PartKind.SOCKET)]
    links = [Link("socket0", "socket1", LinkKind.SOCKETS, _SOCKETS_RATE)]
    for switch, socket in enumerate(sockets):
        parts.append(Part(f"switch{switch}", PartKind.SWITCH))
        links.append(Link(f"switch{switch}", f"socket{socket}", LinkKind.PCIE, osdi20.CROSS_SWITCH_RATE))
        for gpu in range(switch * gpus_per_switch, (switch + 1) * gpus_per_switch):
            parts.append(Part(f"gpu{gpu}", PartKind.GPU))
            links.append(Link(f"gpu{gpu}", f"switch{switch}", LinkKind.PCIE, osdi20.PCIE_RATE))
    parts.append(Part("nic0", PartKind.NIC, wire_rate_bytes=osdi20.CARD_RATE))
    links.append(Link("nic0", card_at, LinkKind.PCIE, _SLOT_RATE))
    links += [Link(f"gpu{a}", f"gpu{b}", LinkKind.NVLINK, _NVLINK_RATE) for a, b in nvlinks]
    return Topology(name, tuple(parts), tuple(links))
