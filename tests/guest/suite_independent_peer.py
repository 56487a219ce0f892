"""Our verbs and those of a program without bpsfast understand each other: writes with immediate, both ways."""
from __future__ import annotations

import pytest

from tests.guest.hosts import DEVICES
from tests.guest.peer_process import PeerProcess, missing
from tests.guest.verbs_end import NBYTES, End

RECV_IMM = 129


@pytest.fixture(scope="module", autouse=True)
def pyverbs_of_the_system():
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def ends(verbs):
    with End(verbs, DEVICES[0]) as end, PeerProcess(DEVICES[1]) as peer:
        peer.connect(end)
        yield end, peer


def test_the_peer_writes_into_our_memory(ends):
    end, peer = ends
    for i, nbytes in enumerate((1, 1024, 1025, NBYTES, 0)):
        end.bytes[:] = 0
        end.receive(wr_id=100 + i)
        peer.call("fill", 0, NBYTES, i + 1)
        assert peer.call("write", 0, nbytes, end.at, end.region.rkey, 0x80000001 + i) == 0
        assert end.completions() == [(100 + i, 0, RECV_IMM, nbytes, 0x80000001 + i, end.pair.number)]
        assert (end.bytes[:nbytes] == i + 1).all() and not end.bytes[nbytes:].any()


def test_we_write_into_its_memory(ends):
    end, peer = ends
    sizes = (1, 1024, 1025, NBYTES // 2, 0)
    assert peer.call("receive", len(sizes)) == len(sizes)
    for i, nbytes in enumerate(sizes):
        peer.call("fill", 0, NBYTES, 0)
        end.bytes[:] = 0x10 + i
        end.write(peer, nbytes, wr_id=i, immediate=0xa0b0c0d0 + i)
        assert peer.call("completions", 1) == [[i + 1, 0, RECV_IMM, nbytes, 0xa0b0c0d0 + i]]
        assert end.completions()[0][:4] == (i, 0, 1, nbytes)
        assert bytes.fromhex(peer.call("content", 0, NBYTES)) == bytes([0x10 + i]) * nbytes + bytes(NBYTES - nbytes)


def test_both_at_once(ends):
    end, peer = ends
    half = NBYTES // 2
    peer.call("fill", 0, NBYTES, 5)
    peer.call("receive", 1)
    end.receive()
    end.bytes[:half] = 6
    end.pair.post_write(1, end.at, half, end.region.lkey, peer.region.address + half, peer.region.rkey, immediate=1)
    assert peer.call("write", 0, half, end.at + half, end.region.rkey, 2) == 0
    end.completions(2)
    assert (end.bytes[half:] == 5).all()
    assert bytes.fromhex(peer.call("content", half, half)) == bytes([6]) * half


def test_a_wrong_rkey_of_its_does_no_harm(ends):
    end, peer = ends
    end.receive()
    peer.call("fill", 0, NBYTES, 5)
    assert peer.call("write", 0, 64, end.at, end.region.rkey ^ 0xff00, 1) == 10
    assert not end.bytes.any()
