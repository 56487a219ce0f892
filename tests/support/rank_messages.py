"""Messages of the rank that runs this, in short words: its endpoint, what is sent and received, a ring of all ranks."""
from __future__ import annotations

import numpy as np

import bpsfast
from bpsfast.collectives.p2p import P2PEndpoint, cross_memory
from bpsfast.collectives.p2p.protocol import EAGER_NBYTES
from bpsfast.trainer import process

SIZES = [0, 1, EAGER_NBYTES, EAGER_NBYTES + 1, 1 << 20, 50 << 20]


def endpoint() -> P2PEndpoint:
    return process.current().extension(P2PEndpoint)


def send(x, to, tag=0, channel=1):
    return endpoint().send(channel, to, tag, x.ctypes.data, x.nbytes, x)


def receive(x, source=None, tag=None, channel=1):
    return endpoint().receive(channel, source, tag, x.ctypes.data, x.nbytes, x)


def pattern(nbytes, seed):
    return (np.arange(nbytes, dtype=np.uint32) * 2654435761 + seed >> 7).astype(np.uint8)


def ring(sizes, copies=True):
    """Send to the next rank and receive from the previous one."""
    if not copies:
        cross_memory.can_read = lambda *token: False
    me, size = bpsfast.rank(), bpsfast.size()
    for nbytes in sizes:
        theirs = np.zeros(nbytes + 3, np.uint8)
        incoming = receive(theirs, (me - 1) % size, 5)
        outgoing = send(pattern(nbytes, me), (me + 1) % size, 5)
        incoming.wait(20)
        outgoing.wait(20)
        assert (incoming.source, incoming.tag, incoming.nbytes) == ((me - 1) % size, 5, nbytes)
        assert np.array_equal(theirs[:nbytes], pattern(nbytes, (me - 1) % size)) and not theirs[nbytes:].any()
    return {peer.pid > 0 for peer in endpoint()._peers.values()}
