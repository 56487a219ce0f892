"""Generated machines: the paper's two, and similar ones."""
from __future__ import annotations

from bpsfast.hardware.topology.graph import Link, LinkKind, Part, PartKind, Topology

GIGA = 1e9
#: Pairs of GPUs of a DGX-1 that NVLink connects: two squares with diagonals, connected corner to corner.
CUBE = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (4, 5), (4, 6), (4, 7), (5, 6), (5, 7), (6, 7),
        (0, 4), (1, 5), (2, 6), (3, 7))


def switched(per_switch=(4, 4), sockets=(0, 1), gpu_rate=105 / 8 * GIGA, switch_rate=None, nvlinks=(),
             card_at="socket0", wire_rate=12.5 * GIGA, memory_rate=0.0, socket_rate=40 * GIGA):
    """Return switches at *sockets* with GPUs below each, and a network card at the part *card_at* (None: no card)."""
    parts = [Part(f"socket{n}", PartKind.SOCKET, memory_rate_bytes=memory_rate) for n in range(max(sockets) + 1)]
    links = [Link(f"socket{n}", f"socket{n + 1}", LinkKind.SOCKETS, socket_rate) for n in range(max(sockets))]
    gpus = 0
    for switch, (n_gpus, socket) in enumerate(zip(per_switch, sockets)):
        parts.append(Part(f"switch{switch}", PartKind.SWITCH))
        links.append(Link(f"switch{switch}", f"socket{socket}", LinkKind.PCIE, switch_rate or gpu_rate))
        for gpu in range(gpus, gpus + n_gpus):
            parts.append(Part(f"gpu{gpu}", PartKind.GPU))
            links.append(Link(f"gpu{gpu}", f"switch{switch}", LinkKind.PCIE, gpu_rate))
        gpus += n_gpus
    links += [Link(f"gpu{a}", f"gpu{b}", LinkKind.NVLINK, 40 * GIGA) for a, b in nvlinks]
    if card_at is not None:
        parts.append(Part("nic0", PartKind.NIC, wire_rate_bytes=wire_rate))
        links.append(Link("nic0", card_at, LinkKind.PCIE, 16 * GIGA))
    return Topology("by formula", tuple(parts), tuple(links))


def dgx1(**values):
    """Return the machine of OSDI'20 Fig. 8: four switches of two GPUs, NVLinks, the card below the first switch."""
    return switched(**{"per_switch": (2, 2, 2, 2), "sockets": (0, 0, 1, 1), "gpu_rate": 13 * GIGA, "nvlinks": CUBE,
                       "card_at": "switch0"} | values)


def load(loads, a, b):
    """Return the load of the link between *a* and *b*."""
    return next(value for link, value in loads.links.items() if {link.a, link.b} == {a, b})
