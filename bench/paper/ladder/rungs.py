"""The rungs: what bpsfast's RDMA transport does, each of its decisions taken back alone, all taken back, and tcp.

Up from the bottom this is how the original system came from 41 to 89 Gbit/s (BytePS, OSDI 2020, section 6.2 and
Table 2): shared memory instead of the NIC's loopback (52), page-aligned buffers (76), one SGE for each write (89); on
a base that had learnt to register once, to exchange addresses once, and not to copy. Each row here takes one step back
from the top, so that a step's worth does not depend on the order of the others.
"""
from __future__ import annotations

from dataclasses import dataclass

from bpsfast.bench.paper.ladder import exchange


@dataclass(frozen=True)
class LadderVariant:
    """One way to move a list. `switches` are those of `WriteExchange`.

    `own_by_wire`: the share that is summed on the worker's own machine goes through the NIC's loopback (tcp: the
    kernel's) instead of staying in shared memory. `unaligned`: no partition begins on a page, nor on a cache line.
    """

    name: str
    about: str
    switches: int = 0
    own_by_wire: bool = False
    unaligned: bool = False
    is_tcp: bool = False


OURS = LadderVariant("ours", "registered and addressed once, in place, page-aligned, one SGE, both directions at once")
VANILLA = LadderVariant("vanilla", "all of the above taken back",
                        exchange.REGISTER | exchange.RENDEZVOUS | exchange.COPY
                        | exchange.TWO_SGES | exchange.HALF_DUPLEX, own_by_wire=True, unaligned=True)
TCP = LadderVariant("tcp", "plain sockets, the own share through the loopback interface", own_by_wire=True, is_tcp=True)

RUNGS = (
    OURS,
    LadderVariant("register per step", "each write's source is registered before it, deregistered after it",
                  exchange.REGISTER),
    LadderVariant("rendezvous per step", "the receiver is asked for address and key before each write",
                  exchange.RENDEZVOUS),
    LadderVariant("memcpy at both ends", "through staging buffers at sender and receiver", exchange.COPY),
    LadderVariant("loopback through NIC", "the own share goes through the device, not shared memory", own_by_wire=True),
    LadderVariant("unaligned", "partitions begin 52 bytes behind a page's begin", unaligned=True),
    LadderVariant("two SGEs", "the first 16 bytes of each write are an SGE of their own", exchange.TWO_SGES),
    LadderVariant("no concurrent TX", "no result is sent before the whole push has arrived", exchange.HALF_DUPLEX),
    VANILLA,
    TCP,
    LadderVariant("tcp, shared memory", "the same, but the own share stays in shared memory", is_tcp=True),
)
BY_NAME = {rung.name: rung for rung in RUNGS}
