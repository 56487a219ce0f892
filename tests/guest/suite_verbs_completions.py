"""Operations that fail, with either provider: refused posts, and bad completions as errors that name the cause."""
from __future__ import annotations

import errno
import threading

import pytest

from bpsfast.hardware.verbs.completions import CompletionError, raise_failure
from tests.guest.hosts import DEVICES
from tests.guest.peer_process import PeerProcess, missing
from tests.guest.verbs_end import NBYTES, End, connected

REMOTE_ACCESS, FLUSHED, RETRIES, RNR = 10, 5, 12, 13


@pytest.fixture
def ends(verbs):
    with connected(verbs) as both:
        yield both


@pytest.fixture
def unconnected(verbs):
    with End(verbs, DEVICES[0]) as left, End(verbs, DEVICES[1]) as right:
        yield left, right


# -- posting ------------------------------------------------------------------------------------------------

def test_more_posts_than_the_queue_holds(ends):
    left, right = ends
    for i in range(left.pair.max_send):
        left.write(right, wr_id=i)
    with pytest.raises(OSError, match=rf"max_send={left.pair.max_send} posts are outstanding") as caught:
        left.write(right, wr_id=99)
    assert caught.value.errno == errno.ENOBUFS
    assert len(left.completions(left.pair.max_send)) == left.pair.max_send
    left.write(right, wr_id=99)
    assert left.completions()[0][:2] == (99, 0)


def test_a_completion_queue_is_not_overrun(verbs):
    with connected(verbs, depth=4, max_send=16, max_recv=16) as (left, right):
        depth = left.queue.depth
        assert depth < 16
        for i in range(depth):
            left.write(right, wr_id=i, signaled=i == depth - 1)
        with pytest.raises(OSError, match=f"could overrun the completion queue, whose {depth} places") as caught:
            left.write(right, wr_id=99)
        assert caught.value.errno == errno.EOVERFLOW
        with pytest.raises(OSError, match="could overrun"):
            left.receive()
        assert [c[:2] for c in left.completions()] == [(depth - 1, 0)] and left.queue.pending == 0
        left.write(right, wr_id=99)
        assert left.completions()[0][:2] == (99, 0)


def test_a_completion_queue_that_grows_keeps_what_is_in_it(verbs):
    with connected(verbs, depth=4, max_send=16, max_recv=16) as (left, right):
        n = left.queue.depth
        for i in range(n):
            left.write(right, wr_id=i)
        left.queue.resize(16)
        assert left.queue.depth >= 16 and left.queue.pending == n
        for i in range(n, 16):
            left.write(right, wr_id=i)
        assert [c[:2] for c in left.completions(16)] == [(i, 0) for i in range(16)]
        depth, most = left.queue.depth, left.device.attributes["max_cqe"]
        with pytest.raises(OSError, match=rf"ibv_resize_cq\(rxe0, depth={most + 1}\): EINVAL.* it has {depth}, the "
                                          f"device takes max_cqe={most} in a queue") as caught:
            left.queue.resize(most + 1)
        assert caught.value.errno == errno.EINVAL and left.queue.depth == depth
        with pytest.raises(ValueError, match="needs depth >= 1, got 0"):
            left.queue.resize(0)


def test_a_post_in_the_wrong_state(unconnected):
    left, right = unconnected
    for post in (lambda: left.write(right), lambda: left.receive()):
        with pytest.raises(OSError, match=r"it is in state RESET \(receives need INIT, sends RTS\)"):
            post()
    assert left.pair.outstanding == (0, 0) and left.queue.pending == 0


# -- bad completions ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("what", ["rkey", "length", "address"])
def test_a_write_that_the_peer_does_not_allow(ends, what):
    left, right = ends
    rkey = right.region.rkey ^ (0xff00 if what == "rkey" else 0)
    nbytes = 200
    address = right.at + {"rkey": 0, "length": NBYTES - 100, "address": -4096}[what]
    left.bytes[:] = 1
    left.pair.post_write(77, left.at, nbytes, left.region.lkey, address, rkey)
    left.write(right, wr_id=78)
    assert [c[:3] for c in left.completions(2)] == [(77, REMOTE_ACCESS, 1), (78, FLUSHED, 1)]
    with pytest.raises(CompletionError) as caught:
        raise_failure(left.pair, slot=12)
    error = caught.value
    assert (error.status, error.wr_id, error.slot, error.operation) == (REMOTE_ACCESS, 77, 12, "WRITE")
    for said in ("slot 12", "from rxe0 to queue pair", f"{right.pair.number} at 0000:", "IBV_WC_REM_ACCESS_ERR (10",
                 f"{address:#x}", "usually", "200 bytes"):
        assert said in str(error), said
    assert not right.bytes.any() and left.pair.state == "ERR"


@pytest.mark.parametrize("where", ["queue pair", "region"])
@pytest.mark.parametrize("operation", ["write", "read"])
def test_what_the_peer_did_not_allow_is_refused(verbs, unconnected, where, operation):
    left, right = unconnected
    rights = {f"remote_{operation}": False, f"remote_{'read' if operation == 'write' else 'write'}": True}
    for end, peer in ((left, right), (right, left)):
        end.connect(peer, init=rights if where == "queue pair" else {})
    of_region = rights if where == "region" else {"remote_read": True}
    with verbs.MemoryRegion(right.domain, right.bytes, **of_region) as region:
        post = left.pair.post_write if operation == "write" else left.pair.post_read
        post(1, left.at, 8, left.region.lkey, region.address, region.rkey)
        assert left.completions()[0][1] in (9, REMOTE_ACCESS)
        with pytest.raises(CompletionError, match=rf"{operation.upper()} of 8 bytes.*IBV_WC_REM_"):
            raise_failure(left.pair)


def test_a_region_that_was_closed_takes_no_more_writes(ends):
    left, right = ends
    right.region.close()
    left.write(right)
    assert left.completions()[0][1] == REMOTE_ACCESS


def test_a_wrong_lkey(ends):
    left, right = ends
    left.pair.post_write(1, left.at, 8, left.region.lkey ^ 0xff00, right.at, right.region.rkey)
    assert left.completions()[0][1] in (2, 4)  # rxe does not say LOC_PROT_ERR
    with pytest.raises(CompletionError, match="failed with IBV_WC_LOC_"):
        raise_failure(left.pair)


@pytest.mark.parametrize("operation", ["write", "send"])
def test_a_receive_queue_that_is_exhausted(ends, operation):
    left, right = ends
    right.receive(nbytes=64)
    for i in range(2):
        if operation == "write":
            left.write(right, wr_id=i, immediate=i)
        else:
            left.pair.post_send(i, left.at, 8, left.region.lkey)
    assert [c[:2] for c in left.completions(2)] == [(0, 0), (1, RNR)]
    with pytest.raises(CompletionError, match=r"RNR_RETRY_EXC_ERR.*no receive request posted"):
        raise_failure(left.pair)


def test_with_retries_a_receive_may_come_late(verbs):
    # rxe may stop for good when its retransmission timer is shorter than the peer's pause
    with connected(verbs, rts={"rnr_retry": 7, "timeout": 14, "retry_count": 7}) as (left, right):
        late = threading.Timer(0.2, right.receive)
        late.start()
        left.write(right, immediate=1)
        assert left.completions()[0][1] == right.completions()[0][1] == 0
        late.join()


def test_a_receive_that_is_too_short(ends):
    left, right = ends
    right.receive(nbytes=10)
    left.pair.post_send(1, left.at, 11, left.region.lkey)
    assert right.completions()[0][1] in (1, 2)  # rxe does not say LOC_LEN_ERR
    assert left.completions()[0][1] in (9, 11)
    with pytest.raises(CompletionError, match=r"receive of 10 bytes.*IBV_WC_LOC_"):
        raise_failure(right.pair)


def test_an_error_with_work_outstanding_flushes_it(ends):
    left, right = ends
    for i in range(4):
        left.receive(wr_id=i)
    left.pair.to_error()
    assert [c[:3] for c in left.completions(4)] == [(i, FLUSHED, 128) for i in range(4)]
    assert left.pair.outstanding == (0, 0) and left.queue.pending == 0
    assert left.pair.failure["status"] == FLUSHED
    right.write(left)
    assert right.completions()[0][1] == RETRIES


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_peer_that_is_killed_while_we_write(verbs):
    with End(verbs, DEVICES[0], nbytes=1 << 20) as end, PeerProcess(DEVICES[1], 1 << 20) as peer:
        peer.connect(end)
        for i in range(end.pair.max_send):
            end.write(peer, 1 << 20, wr_id=i)
        assert end.completions()[0][:2] == (0, 0)
        peer.process.kill()
        statuses = [c[1] for c in end.completions(end.pair.max_send - 1)]
        bad = [status for status in statuses if status]
        assert bad and bad[0] in (RETRIES, REMOTE_ACCESS) and set(bad[1:]) <= {FLUSHED}
        with pytest.raises(CompletionError, match=r"WRITE of 1048576 bytes .* from rxe0"):
            raise_failure(end.pair)
