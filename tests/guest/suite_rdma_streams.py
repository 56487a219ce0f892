"""Streams on real devices: writes whole and in order, credit on completion, nothing accepted that is not bound.

Runs in the guest: two rails in one process, rxe0 and rxe1.
"""
from __future__ import annotations

import ctypes
import errno
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bpsfast.node.transport.rdma.failures import PortNow, describe
from bpsfast.pyx import engine as native
from bpsfast.pyx.rdma import Stream
from tests.guest.stream_side import EPOCH, MAX_RECEIVE, N_SLOTS, NBYTES, aim, connected, prove, wait_for
from tests.guest.verbs_end import until


@pytest.fixture
def sides(request):
    with connected(**getattr(request, "param", {})) as made:
        yield made


@pytest.fixture
def proven(sides):
    return prove(sides)


def test_a_write_lands_in_the_slot_of_its_round_with_its_immediate(proven):
    left, right = proven
    right.expect(3, 0, NBYTES)
    aim(left, right, 3, 0, NBYTES)
    for round_ in range(1, 20):
        left.bytes[:NBYTES] = round_
        left.stream.post(3, round_, 0, left.region.address, NBYTES)
        [(kind, source, part, got, _, _, nbytes)] = left.events(1)
        assert (kind, source, part, got, nbytes) == (native.EVENT_DELIVERED, left.source, 3, round_, NBYTES)
        wait_for(lambda: right.stream.counters()["writes_received"], round_)
        assert (right.bytes[NBYTES * (round_ & 1):][:NBYTES] == round_).all()
    counters = right.stream.counters()
    assert counters["receives_posted"] == counters["slots_bound"] == 1
    assert left.stream.counters()["writes_sent"] == 19 and len(left.stream.trace()) == 19 * 32


@pytest.mark.parametrize("first_round", [500, (1 << 32) - 1])
def test_a_slot_that_is_bound_anew_expects_the_round_that_it_is_told(proven, first_round):
    """As when its owner has changed: a write carries its round modulo 16 only."""
    left, right = proven
    right.expect(3, 0, NBYTES)
    aim(left, right, 3, 0, NBYTES)
    left.stream.post(3, 1, 0, left.region.address, NBYTES)
    wait_for(lambda: right.stream.counters()["writes_received"], 1)
    right.stream.bind(3, right.region.address + 2 * NBYTES, right.region.address + 3 * NBYTES, NBYTES,
                    first_round=first_round)
    aim(left, right, 3, 2 * NBYTES, 3 * NBYTES)
    for n in range(3):
        round_ = (first_round + n) % (1 << 32)
        left.bytes[:NBYTES] = 10 + n
        left.stream.post(3, round_, 0, left.region.address, NBYTES)
        wait_for(lambda: right.stream.counters()["writes_received"], 2 + n)
        assert (right.bytes[NBYTES * (2 + (round_ & 1)):][:NBYTES] == 10 + n).all()
    counters = right.stream.counters()
    assert counters["receives_posted"] == counters["slots_bound"] == 1


@pytest.mark.parametrize("sides", [{}, {"signal_every": 3}, {"signal_every": 1000}], indirect=True, ids=str)
def test_more_posts_than_the_queue_pair_holds_wait_in_order(proven):
    left, right = proven
    n = MAX_RECEIVE
    for slot in range(n):
        right.expect(slot, 4096 * slot, 4096 * slot, 4096)
        aim(left, right, slot, 4096 * slot, 4096 * slot, 4096)
    for round_ in range(1, 6):
        left.bytes[:4096] = round_
        for slot in range(n):
            left.stream.post(slot, round_, 0, left.region.address, 4096)
        events = left.events(n)
        assert [(event[0], event[2]) for event in events] == [(native.EVENT_DELIVERED, slot) for slot in range(n)]
        wait_for(lambda: right.stream.counters()["writes_received"], n * round_)
        assert (right.bytes[:4096 * n] == round_).all()
    wait_for(lambda: left.stream.counters()["writes_pending"], 0)
    right.stream.bind(n, right.region.address, right.region.address, 4096)
    counters = right.stream.counters()
    assert (counters["receives_posted"], counters["slots_bound"]) == (MAX_RECEIVE, n + 1)
    right.stream.unbind(3)
    assert right.stream.counters()["slots_bound"] == n


def rnr_naks(device: str) -> int:
    """Return how often the peers of *device* have told it that no receive request is posted."""
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_rnr_err").read_text())


@pytest.mark.parametrize(("sides", "n", "nbytes"), [
    ({"max_receive": 4, "n_slots": 300, "rnr_retry": 7, "timeout": 17}, 300, 256),
    ({"max_receive": 64, "n_slots": 5000, "rnr_retry": 7, "timeout": 17, "signal_every": 4}, 5000, 16),
], indirect=["sides"], ids=["300 slots", "5000 slots"])
def test_more_slots_than_receive_requests_lose_nothing_although_the_receiver_is_late(sides, n, nbytes):
    left, right = sides
    max_receive, n_rounds, n_threads = right.pair.max_recv, 3, 4
    may_go_on, arrivals = threading.Event(), queue.SimpleQueue()

    def arrive(_engine: int, _source: int, part: int, round_: int, _flags: int) -> None:
        arrivals.put((part, round_))
        may_go_on.wait()  # it is the rail's thread that is held back

    late = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_uint32] * 4)(arrive)
    prove(sides, start=False)
    left.start()
    right.stream.start(peer=right.source, engine=right.engine.handle, notify=right.engine.notify_address,
                       arrived=ctypes.cast(late, ctypes.c_void_p).value, keep=(late, right.engine))
    for slot in range(n):
        right.stream.bind(slot, right.region.address + nbytes * slot, right.region.address + nbytes * slot, nbytes)
        aim(left, right, slot, nbytes * slot, nbytes * slot, nbytes)
    assert right.stream.counters()["receives_posted"] == max_receive
    random = np.random.default_rng(1)

    def post(thread: int, round_: int) -> None:
        for slot in range(thread, n, n_threads):
            left.stream.post(slot, round_, 0, left.region.address + nbytes * slot, nbytes)

    naks = rnr_naks("rxe0")
    with ThreadPoolExecutor(n_threads) as executor:
        for round_ in range(1, n_rounds + 1):
            left.bytes[:n * nbytes] = random.integers(0, 256, n * nbytes, np.uint8)
            list(executor.map(post, range(n_threads), [round_] * n_threads))
            try:
                until(lambda: rnr_naks("rxe0") > naks + 20)  # a limit would be 6 at most
                assert may_go_on.is_set() or left.stream.counters()["writes_pending"] >= n - max_receive - 1
            finally:
                may_go_on.set()
            left.events(n)
            found = sorted(arrivals.get(timeout=20) for _ in range(n))
            assert found == [(slot, round_) for slot in range(n)]
            assert (right.bytes[:n * nbytes] == left.bytes[:n * nbytes]).all()
    assert left.stream.failure() is None and right.stream.failure() is None
    counters = right.stream.counters()
    assert (counters["receives_posted"], counters["writes_received"]) == (max_receive, n * n_rounds)


@pytest.mark.parametrize("sides", [{}, {"signal_every": 4}], indirect=True, ids=str)
def test_of_writes_that_wait_in_a_row_some_ask_for_no_completion(proven):
    left, right = proven
    for slot in range(MAX_RECEIVE):
        right.expect(slot, 0, 0)
        aim(left, right, slot, 0, 0)
    completions = left.rail.counters()["completions"]
    taken = n = 0
    # A device that sends as fast as we post has nothing waiting: repeat until for once it had.
    for round_ in range(1, 6 if left.signal_every == 1 else 200):
        left.bytes[:NBYTES] = round_ % 251
        for slot in range(MAX_RECEIVE):
            left.stream.post(slot, round_, 0, left.region.address, NBYTES)
        left.events(MAX_RECEIVE)
        wait_for(lambda: right.stream.counters()["writes_received"], MAX_RECEIVE * round_)
        assert (right.bytes[:NBYTES] == round_ % 251).all()
        taken, n = left.rail.counters()["completions"] - completions, round_ * MAX_RECEIVE
        if left.signal_every > 1 and taken < n:
            break
    assert taken == n if left.signal_every == 1 else round_ <= taken < n, taken


@pytest.mark.parametrize("sides", [{"inline_nbytes": 256}], indirect=True, ids=str)
def test_a_small_write_that_travels_inline_has_left_its_source_when_it_is_posted(proven):
    left, right = proven
    right.expect(1, 0, 0, 256)
    aim(left, right, 1, 0, 0, 256)
    for round_ in range(1, 30):
        left.bytes[:256] = round_
        left.stream.post(1, round_, 0, left.region.address, 256)
        left.bytes[:256] = 0
        left.events(1)
        wait_for(lambda: right.stream.counters()["writes_received"], round_)
        assert (right.bytes[:256] == round_).all()


def test_a_stream_that_never_asks_for_completions_is_no_stream(sides):
    with pytest.raises(ValueError, match="max_send=0, max_receive=1: nothing would ever be sent"):
        Stream(sides[0].rail, sides[0].pair.handle, epoch=1, n_slots=1, max_send=0, max_receive=1)
    with pytest.raises(ValueError, match="signal_every=0"):
        Stream(sides[0].rail, sides[0].pair.handle, epoch=1, n_slots=1, max_send=1, max_receive=1, signal_every=0)


def test_an_empty_contribution_writes_nothing(proven):
    left, right = proven
    right.expect(1, 0, 0)
    aim(left, right, 1, 0, 0)
    right.bytes[:] = 7
    left.stream.post(1, 1, native.FLAG_EMPTY, 0, 0)
    assert left.events(1)[0][0] == native.EVENT_DELIVERED
    wait_for(lambda: right.stream.counters()["writes_received"], 1)
    assert (right.bytes == 7).all()


def test_frames_have_any_length_that_fits(proven):
    left, right = proven
    right.expect(1, 0, NBYTES, framed=True)
    aim(left, right, 1, 0, NBYTES, framed=True)
    for round_, nbytes in enumerate((8, NBYTES, 9, 5000), start=1):
        left.bytes[:nbytes] = round_
        left.bytes[:8] = np.frombuffer((nbytes - 8).to_bytes(8, "little"), np.uint8)
        left.stream.post(1, round_, 0, left.region.address, nbytes)
        assert left.events(1)[0][6] == nbytes
        wait_for(lambda: right.stream.counters()["writes_received"], round_)
        assert (right.bytes[NBYTES * (round_ & 1):][:nbytes] == left.bytes[:nbytes]).all()
    with pytest.raises(ValueError, match="has 65536 bytes at the peer, 65537 were posted"):
        left.stream.post(1, 5, 0, left.region.address, NBYTES + 1)


@pytest.mark.parametrize(("nbytes", "said"), [(7, 0), (50, 41), (50, 43)])
def test_a_frame_that_lies_about_its_length_ends_the_stream(proven, nbytes, said):
    left, right = proven
    right.expect(1, 0, 0, framed=True)
    aim(left, right, 1, 0, 0, framed=True)
    left.bytes[:8] = np.frombuffer(said.to_bytes(8, "little"), np.uint8)
    left.stream.post(1, 1, 0, left.region.address, nbytes)
    [(kind, source, _, _, code, _, _)] = right.events(1)
    assert (kind, source, code) == (native.EVENT_LOST, right.source, errno.EPROTO)


@pytest.mark.parametrize(("slot", "round_", "nbytes"), [(2, 1, NBYTES), (1, 2, NBYTES), (1, 17 + 1, NBYTES),
                                                       (1, 1, NBYTES - 1), (70, 1, NBYTES)],
                         ids=["unbound", "round ahead", "round ahead by 17", "too short", "beyond the table"])
def test_what_fits_no_slot_ends_the_stream_in_words(proven, slot, round_, nbytes):
    left, right = proven
    right.expect(1, 0, 0)
    if slot >= N_SLOTS:
        with pytest.raises(ValueError, match="slot 70 of 64"):
            left.stream.aim(slot, 1, 1, 1, 1)
        return
    aim(left, right, slot, 0, 0, nbytes)
    left.stream.post(slot, round_, 0, left.region.address, nbytes)
    [(kind, source, _, _, code, _, _)] = right.events(1)
    assert (kind, source, code) == (native.EVENT_LOST, right.source, errno.EPROTO)
    failure = right.stream.failure()
    assert failure["kind"] == "arrival" and failure["code"] == EPOCH
    assert (failure["slot"], failure["round"], failure["nbytes"]) == (slot, round_ % 16, nbytes)


def test_what_cannot_be_posted_is_refused_in_words(proven):
    left, right = proven
    with pytest.raises(ValueError, match="has not said where slot 5 lies"):
        left.stream.post(5, 1, 0, left.region.address, NBYTES)
    aim(left, right, 5, 0, 0)
    with pytest.raises(ValueError, match="has 65536 bytes at the peer, 10 were posted"):
        left.stream.post(5, 1, 0, left.region.address, 10)
    for address in (left.region.address - 1, left.region.address + 3 * NBYTES + 1, 4096):
        with pytest.raises(ValueError, match="are not registered with the rail"):
            left.stream.post(5, 1, 0, address, NBYTES)
    assert left.stream.counters()["writes_sent"] == 0


def test_a_wrong_rkey_fails_both_ends_and_names_the_write(proven):
    left, right = proven
    right.expect(1, 0, 0)
    left.stream.aim(1, right.region.address, right.region.address, NBYTES, right.region.rkey ^ 0xffff00)
    left.stream.post(1, 1, 0, left.region.address, NBYTES)
    [(kind, source, _, _, code, _, _)] = left.events(1)
    assert (kind, source, code) == (native.EVENT_LOST, left.source, errno.EIO)
    failure = left.stream.failure()
    assert (failure["kind"], failure["code"], failure["slot"], failure["round"]) == ("completion", 10, 1, 1)
    assert (right.bytes == 0).all()


def test_a_write_without_a_receive_request_is_named(proven):
    left, right = proven
    aim(left, right, 1, 0, 0)  # the peer has bound nothing
    left.stream.post(1, 1, 0, left.region.address, NBYTES)
    assert left.events(1)[0][0] == native.EVENT_LOST
    assert left.stream.failure()["code"] == 13
    assert "failed: IBV_WC_RNR_RETRY_EXC_ERR (13" in describe(left.stream.failure(), "node 1", "rxe0/1", PortNow())


def test_a_slot_is_bound_after_the_proof(sides):
    left, _ = sides
    with pytest.raises(ValueError, match="before the peer's proof has come"):
        left.stream.bind(1, left.region.address, left.region.address, NBYTES)
