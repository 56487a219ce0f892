"""How gradient bytes travel between two nodes: chosen per pair of nodes, once, with a reason that can be asked for.

    shm    same host: the peer maps our segments and bytes never move (`shm`)
    rdma   else, where both have a device: one-sided writes by the network cards (`rdma`)
    tcp    else: one-sided writes over authenticated streams (`tcp`)

shm is chosen iff exchanging a memfd over the peer's socket worked, rdma iff a first write passed in both directions:
tries, not comparisons of names. Of each pair the node with the higher index dials. Helpers have nothing to say to one
another.
"""
from __future__ import annotations

from .epochs import Epochs
from .links import Link, TalkingLink, WireLink, WireStream, talking, wire
from .peering import Peering, check, peers_of, shm_objection

__all__ = [
    "Epochs",
    "Link",
    "Peering",
    "TalkingLink",
    "WireLink",
    "WireStream",
    "check",
    "peers_of",
    "shm_objection",
    "talking",
    "wire",
]
