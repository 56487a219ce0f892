from __future__ import annotations

import numpy as np
import pytest

import bpsfast
from bpsfast.trainer import current


def post():
    return current.current().post


def send(x, to, tag=0, channel=1):
    return post().send(channel, to, tag, x.ctypes.data, x.nbytes, x)


def receive(x, source=None, tag=None, channel=1):
    return post().receive(channel, source, tag, x.ctypes.data, x.nbytes, x)


def ring(nbytes):
    """Send to the next rank, receive from the one before."""
    me, size = bpsfast.rank(), bpsfast.size()
    ours, theirs = np.full(nbytes, me, np.uint8), np.zeros(nbytes + 3, np.uint8)
    incoming = receive(theirs, (me - 1) % size, 5)
    outgoing = send(ours, (me + 1) % size, 5)
    incoming.wait(20)
    outgoing.wait(20)
    assert (incoming.source, incoming.tag, incoming.nbytes) == ((me - 1) % size, 5, nbytes)
    return int(theirs[:nbytes].sum()) == nbytes * ((me - 1) % size) and not theirs[nbytes:].any()


@pytest.mark.parametrize("nbytes", [0, 1, 8192, 8193, 1 << 20, 50 << 20])
def test_a_ring(two, three, nbytes):
    assert two.run(ring, nbytes) == [True] * 2
    assert three.run(ring, nbytes) == [True] * 3
