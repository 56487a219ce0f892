"""How two parts are joined, in the words of ``nvidia-smi topo -m``, and how fast that is."""
from __future__ import annotations

from typing import NamedTuple

from .graph import LinkKind, PartKind, Topology

#: Every word that `joint` uses, and what it means; NV# has the number of NVLinks in place of #.
WORDS = {
    "NV#": "# NVLinks, directly or over NVSwitches",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches, no socket",
    "NODE": "one socket (nvidia-smi: PHB, too)",
    "SYS": "sockets and what is between them",
}
#: No way at all.
NOT_CONNECTED = "-"


class Connection(NamedTuple):
    """The `word`, and bytes/s per direction of the slowest link on the way (0 if there is no way)."""

    word: str
    rate_bytes: float


def joint(topology: Topology, one: str, other: str) -> Connection:
    """Return how the parts *one* and *other* are joined: by NVLinks if there are any, else over PCIe and sockets."""
    links = {name: link for name, link in topology.neighbours(one, LinkKind.NVLINK)}
    if other in links:
        return Connection(f"NV{links[other].n_links}", links[other].rate_bytes)
    beyond = {name: link for name, link in topology.neighbours(other, LinkKind.NVLINK)}
    ways = [(min(links[name].n_links, beyond[name].n_links), min(links[name].rate_bytes, beyond[name].rate_bytes))
            for name in links.keys() & beyond.keys() if topology.part(name).kind is PartKind.NVSWITCH]
    if ways:
        return Connection(f"NV{sum(n_links for n_links, _ in ways)}", sum(rate for _, rate in ways))
    path = topology.path(one, other)
    if not path:
        return Connection(NOT_CONNECTED, 0.0)
    kinds = [topology.part(name).kind for name in {end for link in path for end in (link.a, link.b)} - {one, other}]
    n_sockets, n_switches = kinds.count(PartKind.SOCKET), kinds.count(PartKind.SWITCH)
    word = "SYS" if n_sockets > 1 else "NODE" if n_sockets else "PXB" if n_switches > 1 else "PIX"
    return Connection(word, min(link.rate_bytes for link in path))
