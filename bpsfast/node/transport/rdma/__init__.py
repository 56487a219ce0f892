"""Two nodes over RDMA: each partition is one WRITE with immediate, from where it lies to where it is summed or read.

    rails        the devices of this node: opened once, all segments registered with each (`budget`: before that, sums)
    rendezvous   over one authenticated connection: offers, queue pairs, a write each way that proves them (`offer`)
    link         the queue pairs to one peer, and what either side knows of the other's slots
    failure      what a lane's failure is called

Nothing is exchanged in steady state: addresses and keys go to the peer once per generation, before anybody says
`Ready`. The connection of the rendezvous stays open; its end is the peer's end, long before a write is given up.
"""
from __future__ import annotations

from . import failures, handshake, limits, link, rails, rdma_messages
from .failures import NoDeviceError, NoRdmaError
from .link import LaneFullError, RdmaLink
from .rails import Rails
from .rdma_messages import PeerSlots

__all__ = [
    "LaneFullError", "NoDeviceError", "NoRdmaError", "PeerSlots", "Rails", "RdmaLink", "budget", "failure", "link",
    "offer", "rails", "rendezvous",
]
