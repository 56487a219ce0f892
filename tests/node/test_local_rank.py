"""A local rank: checked before it is let in, told where its memory is, each result segment once."""
from __future__ import annotations

import os
import socket

import pytest

from bpsfast.base import message_socket
from bpsfast.base.message_socket import MessageSocket
from bpsfast.node import local_listener
from bpsfast.node.local_ranks import LocalRank
from bpsfast.node.regions import Regions
from bpsfast.node.transport import shm
from bpsfast.orchestration.errors import CapacityError, ConfigError, ProtocolError
from bpsfast.orchestration.messages import VERSION, Allocate, Allocated, Attach, SegmentShared
from bpsfast.pyx.pages import Segment


@pytest.fixture
def rank_and_far_end():
    near, far = (MessageSocket(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    regions = Regions(max_bytes=16 << 20)
    message = Attach(version=VERSION, package="", pid=os.getpid(), local_rank=0, local_size=1, rank=-1, size=-1,
                     proof=b"", settings={})
    rank = LocalRank(near, message, os.pidfd_open(os.getpid()), regions)
    yield rank, far
    rank.close()
    far.close()
    regions.close()


def test_memory_is_known_to_the_engine_before_the_rank_hears_of_it(rank_and_far_end):
    rank, far = rank_and_far_end
    heard_first = []
    rank.allocate(Allocate(request=1, nbytes=5000), lambda chunk: heard_first.append((chunk.index, far.recv_nowait())))
    (shared, (fd,)), (allocated, _) = far.recv_nowait()
    assert heard_first == [(0, [])]
    assert (shared.owner, shared.segment) == ("rank", 0)
    assert allocated == Allocated(request=1, segment=0, offset=0)
    with Segment.attach(fd, writable=True) as mapped:
        assert mapped.nbytes == shared.nbytes
    rank.allocate(Allocate(request=2, nbytes=5000), lambda chunk: pytest.fail("there was room"))
    assert [message for message, _ in far.recv_nowait()] == [Allocated(request=2, segment=0, offset=8192)]


def test_what_cannot_be_had_is_refused(rank_and_far_end):
    rank, far = rank_and_far_end
    with pytest.raises(CapacityError):
        rank.allocate(Allocate(request=1, nbytes=17 << 20), lambda chunk: None)
    with pytest.raises(ProtocolError, match="asked for 0 bytes"):
        rank.allocate(Allocate(request=2, nbytes=0), lambda chunk: None)
    assert far.recv_nowait() == []


def test_a_result_segment_is_shared_once(rank_and_far_end):
    rank, far = rank_and_far_end
    with Segment(4096, huge=False) as segment:
        rank.share_result(1, 3, segment)
        rank.share_result(1, 3, segment)
        ((message, (fd,)),) = far.recv_nowait()
    os.close(fd)
    assert message == SegmentShared(owner="result:1", segment=3, nbytes=4096)


def test_a_rank_that_is_gone_is_not_told(rank_and_far_end):
    rank, far = rank_and_far_end
    far.close()
    rank.tell(Allocated(request=1, segment=0, offset=0))
    assert rank.dead and rank.gone


def test_proof_and_user_are_checked():
    proof = message_socket.attach_proof(b"key", 17, 2)
    local_listener.check_proof(b"key", 17, 2, proof)
    for key, pid, number in ((b"other", 17, 2), (b"key", 18, 2), (b"key", 17, 3)):
        with pytest.raises(ConfigError, match=f"process {pid} has another job key"):
            local_listener.check_proof(key, pid, number, proof)
    near, far = (MessageSocket(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    shm.check_user(near)
    near.close()
    far.close()
