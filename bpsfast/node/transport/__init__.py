"""Transports between nodes: each pair of nodes uses one of three, chosen by trial, and logs the reason.

    shm    same host: the peer maps this node's segments, and no bytes are copied (`shm`)
    rdma   otherwise, if both have a device: one-sided writes by the network cards (`rdma`)
    tcp    otherwise: one-sided writes over authenticated streams (`tcp`)

shm is used if exchanging a memfd over the peer's socket works, rdma if a first write passes in both directions. Of each
pair the node with the higher index dials. Helpers do not connect to one another.
"""
from __future__ import annotations

from .links import WireLink, WireStream
from .peering import Link, Peering, TalkingLink, check, peers_of, shm_objection, talking, wire
from .tcp import Epochs

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
