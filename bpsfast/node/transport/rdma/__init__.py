"""RDMA between two nodes: each partition is one WRITE with immediate, from its place in memory to where it is used.

    rails        the devices of this node: opened once, all segments registered with each (after a check of limits)
    handshake    over one authenticated connection: offers, queue pairs, a write each way that proves them
    link         the queue pairs to one peer, and what each side knows of the other's slots
    returns      makes links again to peers whose link has failed
    failures     names the failures of a stream

Nothing is exchanged in steady state: addresses and keys are sent to the peer once per generation, before `Ready`. The
connection of the handshake stays open; its end means the end of the peer, long before a write times out.
"""
from __future__ import annotations

from .failures import NoDeviceError, NoRdmaError
from .link import RdmaLink
from .rails import Rails
from .rdma_messages import LinkClosed, LinkResumed, LinkTaken, PeerSlots

__all__ = [
    "LinkClosed",
    "LinkResumed",
    "LinkTaken",
    "NoDeviceError",
    "NoRdmaError",
    "PeerSlots",
    "Rails",
    "RdmaLink",
]
