"""All to all, to one, from one: with sizes that differ, on one node and on two, against the definition."""
from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

import bpsfast
from bpsfast.collectives.p2p import P2PEndpoint
from bpsfast.collectives.p2p.message_collectives import MessageCall
from bpsfast.trainer import process

SHAPES = [(2,), (1, 1), (2, 2)]
Memory = namedtuple("Memory", "address nbytes")


def p2p(session):
    return session.extension(P2PEndpoint)


def nbytes_of(source, to, size, scale):
    """Some send nothing, some little, some much."""
    return [0, 17, 9000, 1][(source * size + to) % 4] * scale


def content(source, to, nbytes):
    return (np.arange(nbytes) * 7 + 31 * source + to).astype(np.uint8)


def memories(arrays):
    return [Memory(x.ctypes.data, x.nbytes) for x in arrays]


def places(arrays):
    return dict(enumerate(memories(arrays)))


def everybody(kind, scale, ranks):
    """Do it on the group *ranks*, if this rank is in it; return whether all that came is what it should be."""
    session = process.current()
    if session.rank not in ranks:
        return True
    me, n, good = ranks.index(session.rank), len(ranks), True
    for root in range(n) if kind != "all_to_all" else [0]:
        ours = [content(me, to, nbytes_of(me, to, n, scale)) for to in range(n)]
        theirs = [np.zeros(nbytes_of(source, me, n, scale), np.uint8) for source in range(n)]
        expected = [content(source, me, x.nbytes) for source, x in enumerate(theirs)]
        owner = ours, theirs
        if kind == "all_to_all":
            MessageCall(p2p(session), 7, ranks, me, owner, 30).exchange(places(ours), places(theirs))
        elif kind == "gather":
            theirs, expected = (theirs, expected) if me == root else ([], [])
            MessageCall(p2p(session), 8, ranks, me, owner, 30).exchange({root: memories(ours)[root]}, places(theirs))
        else:
            MessageCall(p2p(session), 9, ranks, me, owner, 30).exchange(
                places(ours) if me == root else {}, {root: memories(theirs)[root]})
            theirs, expected = theirs[root:root + 1], expected[root:root + 1]
        good = good and len(theirs) == len(expected) and all(map(np.array_equal, theirs, expected))
    return good


@pytest.mark.parametrize("ranks", SHAPES)
@pytest.mark.parametrize("kind", ["all_to_all", "gather", "scatter"])
def test_what_comes(shared_job, ranks, kind):
    started = shared_job(ranks=ranks, transport="tcp")
    for scale in (1, 300):
        assert started.run(everybody, kind, scale, list(range(started.size))) == [True] * started.size
        assert started.run(everybody, kind, scale, list(range(started.size))[::-1][:3]) == [True] * started.size


def other_sizes():
    session = process.current()
    x = np.zeros(100, np.uint8)
    mine, theirs = (dict.fromkeys(range(2), Memory(x.ctypes.data, n)) for n in (10 + session.rank, 10))
    with pytest.raises(bpsfast.MismatchError) as caught:
        MessageCall(p2p(session), 11, [0, 1], session.rank, x, 20).exchange(mine, theirs)
    return str(caught.value)


def test_sizes_that_are_not_what_is_expected(job):
    zero, one = job(ranks=(2,)).run(other_sizes)
    assert "a message of 11 bytes from rank 1" in zero and "a message of 11 bytes from rank 1" in one


def shorter():
    session = process.current()
    x = np.zeros(100, np.uint8)
    with pytest.raises(bpsfast.MismatchError) as caught:
        MessageCall(p2p(session), 11, [0], 0, x, 20).exchange(
            {0: Memory(x.ctypes.data, 10)}, {0: Memory(x.ctypes.data + 50, 30)})
    return str(caught.value)


def test_a_message_that_is_shorter(job):
    assert job(ranks=(1,)).run(shorter) == ["rank 0 has sent 10 bytes with tag 0 on channel 11, 30 were expected"]


def missing():
    session = process.current()
    if session.rank == 0:
        p2p(session).receive(12, 1, 5, 0, 0, None)
        x = np.zeros(100_000, np.uint8)
        with pytest.raises(bpsfast.StallError) as caught:
            MessageCall(p2p(session), 12, [0, 1], 0, x, 0.5).exchange(places([x, x]), places([x, x]))
        bpsfast.barrier()
        return str(caught.value), len(p2p(session).receiver.matching._receives)
    assert p2p(session) is not None
    bpsfast.barrier()
    return "", 0


def test_who_does_not_take_part_is_named(job):
    started = job(ranks=(1, 1))
    text, n_receives = started.run(missing)[0]
    assert "for rank 1 to" in text and "on channel 12" in text
    assert n_receives == 1, "what nobody waits for any more is cancelled, and nothing else"
    started.kill()
