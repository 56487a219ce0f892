"""Lanes and rails on real devices: writes whole and in order, credit on completion, nothing accepted that is not bound.

Runs in the guest: two rails in one process, rxe0 and rxe1.
"""
from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bpsfast.pyx import engine as native, ring, verbs
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.rdma import Lane, Rail
from bpsfast.transport.rdma.failure import describe

EPOCH = 5
NBYTES = 1 << 16
N_SLOTS = 64
MAX_SEND = 8
MAX_RECEIVE = 16


class Side:
    """One device with a rail, one queue pair and its lane, an engine as the lane's mailbox, and registered memory."""

    def __init__(self, name: str, **options: int) -> None:
        self.signal_every = options.get("signal_every", 1)
        self.device = verbs.Device(name)
        self.domain = verbs.ProtectionDomain(self.device)
        self.queue = verbs.CompletionQueue(self.device, 2 * (MAX_SEND + MAX_RECEIVE), events=True)
        self.pair = verbs.QueuePair(self.domain, self.queue, self.queue, max_send=MAX_SEND, max_recv=MAX_RECEIVE,
                                    max_inline=options.get("inline_nbytes", 0))
        self.pair.to_init(1)
        self.rail = Rail(self.queue.handle, keep=self.queue)
        self.lane = Lane(self.rail, self.pair.handle, epoch=EPOCH, n_slots=N_SLOTS, max_send=MAX_SEND,
                         max_receive=MAX_RECEIVE, trace_capacity=100, keep=self.pair, **options)
        self.board, self.bell = Segment(ring.BOARD_NBYTES, populate=False), Segment(ring.DOORBELL_NBYTES)
        ring.format_board(self.board)
        ring.format_doorbell(self.bell)
        self.engine = Engine(self.board, self.bell, n_threads=1)
        self.source = self.engine.add_wire_peer()
        self.memory = Segment(4 * NBYTES, huge=False)
        self.region = verbs.MemoryRegion(self.domain, self.memory)
        self.rail.know(self.region.address, self.region.nbytes, self.region.lkey)
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def connect(self, number: int, psn: int, gid: bytes, rnr_retry: int = 0) -> None:
        self.pair.to_rtr(number, psn, gid=gid, gid_index=1, mtu=1024)
        self.pair.to_rts(timeout=10, retry_count=3, rnr_retry=rnr_retry)

    @property
    def place(self) -> tuple[int, int, bytes]:
        return self.pair.number, self.pair.psn, self.device.gid(1, 1)

    def start(self) -> None:
        self.lane.start(peer=self.source, engine=self.engine.handle, arrived=self.engine.arrived_address,
                        notify=self.engine.notify_address, keep=self.engine)

    def expect(self, slot: int, even: int, odd: int, nbytes: int = NBYTES) -> None:
        """Bind a slot at two offsets of the memory; the engine takes what arrives for a result."""
        self.engine.add_member(slot, nbytes=nbytes, n_elements=nbytes, unit_offset=0, kernel=1, local=[self.source],
                               owner=self.source, partial=(0, 0, 0))
        self.lane.bind(slot, self.region.address + even, self.region.address + odd, nbytes)

    def events(self, n: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        while len(found) < n:
            batch = self.engine.events(20)
            assert batch, f"only {found} of {n} events came"
            found += batch
        return found

    def close(self) -> None:
        del self.bytes
        self.lane.close()
        self.pair.close()
        self.rail.close()
        self.region.close()
        self.queue.close()
        self.domain.close()
        self.device.close()
        self.engine.close()
        self.engine = None
        for segment in (self.memory, self.board, self.bell):
            segment.close()


@pytest.fixture
def sides(request):
    made = [Side(name, **getattr(request, "param", {})) for name in ("rxe0", "rxe1")]
    left, right = made
    left.connect(*right.place)
    right.connect(*left.place)
    yield made
    for side in made:
        side.close()


@pytest.fixture
def proven(sides):
    left, right = sides
    with ThreadPoolExecutor(1) as executor:
        other = executor.submit(right.lane.prove, 20)
        assert left.lane.prove(20) and other.result()
    for side in sides:
        side.start()
    return sides


def aim(sender: Side, receiver: Side, slot: int, even: int, odd: int, nbytes: int = NBYTES) -> None:
    base = receiver.region.address
    sender.lane.aim(slot, base + even, base + odd, nbytes, receiver.region.rkey)


def wait_for(read, value):
    while read() != value:
        os.sched_yield()


def test_a_write_lands_in_the_slot_of_its_round_with_its_immediate(proven):
    left, right = proven
    right.expect(3, 0, NBYTES)
    aim(left, right, 3, 0, NBYTES)
    for round_ in range(1, 20):
        left.bytes[:NBYTES] = round_
        left.lane.post(3, round_, 0, left.region.address, NBYTES)
        [(kind, source, part, got, _, _, nbytes)] = left.events(1)
        assert (kind, source, part, got, nbytes) == (native.EVENT_DELIVERED, left.source, 3, round_, NBYTES)
        wait_for(lambda: right.lane.counters()["writes_received"], round_)
        assert (right.bytes[NBYTES * (round_ & 1):][:NBYTES] == round_).all()
    counters = right.lane.counters()
    assert counters["receives_posted"] == counters["slots_bound"] == 1
    assert left.lane.counters()["writes_sent"] == 19 and len(left.lane.trace()) == 19 * 32


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
            left.lane.post(slot, round_, 0, left.region.address, 4096)
        events = left.events(n)
        assert [(event[0], event[2]) for event in events] == [(native.EVENT_DELIVERED, slot) for slot in range(n)]
        wait_for(lambda: right.lane.counters()["writes_received"], n * round_)
        assert (right.bytes[:4096 * n] == round_).all()
    assert left.lane.counters()["writes_pending"] == 0
    with pytest.raises(OSError, match="16 slots are bound, the queue pair was made for 16") as caught:
        right.expect(n, 0, 0, 4096)
    assert caught.value.errno == errno.ENOSPC
    right.lane.unbind(3)
    right.lane.bind(n + 1, right.region.address, right.region.address, 4096)


@pytest.mark.parametrize("sides", [{}, {"signal_every": 4}], indirect=True, ids=str)
def test_of_writes_that_wait_in_a_row_some_ask_for_no_completion(proven):
    left, right = proven
    for slot in range(MAX_RECEIVE):
        right.expect(slot, 0, 0)
        aim(left, right, slot, 0, 0)
    completions = left.rail.counters()["completions"]
    for round_ in range(1, 6):
        left.bytes[:NBYTES] = round_
        for slot in range(MAX_RECEIVE):  # 64 KiB take far longer to send than to post
            left.lane.post(slot, round_, 0, left.region.address, NBYTES)
        left.events(MAX_RECEIVE)
        wait_for(lambda: right.lane.counters()["writes_received"], MAX_RECEIVE * round_)
        assert (right.bytes[:NBYTES] == round_).all()
    taken, n = left.rail.counters()["completions"] - completions, 5 * MAX_RECEIVE
    assert taken == n if left.signal_every == 1 else 5 <= taken < n, taken


@pytest.mark.parametrize("sides", [{"inline_nbytes": 256}], indirect=True, ids=str)
def test_a_small_write_that_travels_inline_has_left_its_source_when_it_is_posted(proven):
    left, right = proven
    right.expect(1, 0, 0, 256)
    aim(left, right, 1, 0, 0, 256)
    for round_ in range(1, 30):
        left.bytes[:256] = round_
        left.lane.post(1, round_, 0, left.region.address, 256)
        left.bytes[:256] = 0
        left.events(1)
        wait_for(lambda: right.lane.counters()["writes_received"], round_)
        assert (right.bytes[:256] == round_).all()


def test_a_lane_that_never_asks_for_completions_is_no_lane(sides):
    with pytest.raises(ValueError, match="signal_every=0"):
        Lane(sides[0].rail, sides[0].pair.handle, epoch=1, n_slots=1, max_send=1, max_receive=1, signal_every=0)


def test_an_empty_contribution_writes_nothing(proven):
    left, right = proven
    right.expect(1, 0, 0)
    aim(left, right, 1, 0, 0)
    right.bytes[:] = 7
    left.lane.post(1, 1, native.FLAG_EMPTY, 0, 0)
    assert left.events(1)[0][0] == native.EVENT_DELIVERED
    wait_for(lambda: right.lane.counters()["writes_received"], 1)
    assert (right.bytes == 7).all()


@pytest.mark.parametrize(("slot", "round_", "nbytes"), [(2, 1, NBYTES), (1, 2, NBYTES), (1, 17 + 1, NBYTES),
                                                       (1, 1, NBYTES - 1), (70, 1, NBYTES)],
                         ids=["unbound", "round ahead", "round ahead by 17", "too short", "beyond the table"])
def test_what_fits_no_slot_ends_the_lane_in_words(proven, slot, round_, nbytes):
    left, right = proven
    right.expect(1, 0, 0)
    if slot >= N_SLOTS:
        with pytest.raises(ValueError, match="slot 70 of 64"):
            left.lane.aim(slot, 1, 1, 1, 1)
        return
    aim(left, right, slot, 0, 0, nbytes)
    left.lane.post(slot, round_, 0, left.region.address, nbytes)
    [(kind, source, _, _, code, _, _)] = right.events(1)
    assert (kind, source, code) == (native.EVENT_LOST, right.source, errno.EPROTO)
    failure = right.lane.failure()
    assert failure["kind"] == "arrival" and failure["code"] == EPOCH
    assert (failure["slot"], failure["round"], failure["nbytes"]) == (slot, round_ % 16, nbytes)


def test_what_cannot_be_posted_is_refused_in_words(proven):
    left, right = proven
    with pytest.raises(ValueError, match="has not said where slot 5 lies"):
        left.lane.post(5, 1, 0, left.region.address, NBYTES)
    aim(left, right, 5, 0, 0)
    with pytest.raises(ValueError, match="has 65536 bytes at the peer, 10 were posted"):
        left.lane.post(5, 1, 0, left.region.address, 10)
    for address in (left.region.address - 1, left.region.address + 3 * NBYTES + 1, 4096):
        with pytest.raises(ValueError, match="are not registered with the rail"):
            left.lane.post(5, 1, 0, address, NBYTES)
    assert left.lane.counters()["writes_sent"] == 0


def test_a_wrong_rkey_fails_both_ends_and_names_the_write(proven):
    left, right = proven
    right.expect(1, 0, 0)
    left.lane.aim(1, right.region.address, right.region.address, NBYTES, right.region.rkey ^ 0xffff00)
    left.lane.post(1, 1, 0, left.region.address, NBYTES)
    [(kind, source, _, _, code, _, _)] = left.events(1)
    assert (kind, source, code) == (native.EVENT_LOST, left.source, errno.EIO)
    failure = left.lane.failure()
    assert (failure["kind"], failure["code"], failure["slot"], failure["round"]) == ("completion", 10, 1, 1)
    assert (right.bytes == 0).all()


def test_a_peer_that_is_gone_is_reported_once_after_the_retries(proven):
    left, right = proven
    right.expect(1, 0, 0)
    aim(left, right, 1, 0, 0)
    right.pair.to_error()
    left.lane.post(1, 1, 0, left.region.address, NBYTES)
    left.lane.post(1, 2, 0, left.region.address, NBYTES)
    [(kind, source, *_)] = left.events(1)
    assert (kind, source) == (native.EVENT_LOST, left.source)
    assert left.lane.failure()["code"] == 12  # retries exceeded, not the flush of what stood behind it
    assert left.engine.events(0.05) == []


def test_a_proof_without_a_peer_fails_in_time(sides):
    left, right = sides
    right.lane.close()
    right.pair.close()
    assert not left.lane.prove(20)
    assert left.lane.failure()["kind"] == "completion"
    left.start()
    assert left.events(1)[0][0] == native.EVENT_LOST


def test_a_write_without_a_receive_request_is_named(proven):
    left, right = proven
    aim(left, right, 1, 0, 0)  # the peer has bound nothing
    left.lane.post(1, 1, 0, left.region.address, NBYTES)
    assert left.events(1)[0][0] == native.EVENT_LOST
    assert left.lane.failure()["code"] == 13
    assert "failed: IBV_WC_RNR_RETRY_EXC_ERR (13" in describe(left.lane.failure(), "node 1", "rxe0/1")


N_QUEUED = 3000


def write_and_wait_for_the_end() -> None:
    """Be the process that is stopped: post writes of 5s to the parent, say so, and say at last what became of them."""
    side = Side("rxe1")
    number, psn, gid = side.place
    print(json.dumps([number, psn, gid.hex()]), flush=True)
    number, psn, gid, address, rkey = json.loads(input())
    side.connect(number, psn, bytes.fromhex(gid), rnr_retry=7)
    assert side.lane.prove(30)
    side.start()
    input()
    side.bytes[:] = 5
    side.lane.aim(1, address, address + NBYTES, NBYTES, rkey)
    for round_ in range(1, N_QUEUED + 1):
        side.lane.post(1, round_, 0, side.region.address, NBYTES)
    print("posted", flush=True)
    while side.events(1)[-1][0] != native.EVENT_LOST:
        continue
    print(json.dumps(side.lane.failure()), flush=True)
    side.close()


def test_a_stopped_peer_that_was_cut_off_writes_nothing_when_it_goes_on():
    program = "from tests.guest.suite_rdma_lanes import *; write_and_wait_for_the_end()"
    left = Side("rxe0")
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as child:
        try:
            def say(what: object) -> None:
                child.stdin.write(json.dumps(what) + "\n")
                child.stdin.flush()

            number, psn, gid = json.loads(child.stdout.readline())
            left.connect(number, psn, bytes.fromhex(gid))
            mine = left.place
            say([mine[0], mine[1], mine[2].hex(), left.region.address, left.region.rkey])
            assert left.lane.prove(30)
            left.start()
            left.expect(1, 0, NBYTES)
            say("go")
            assert child.stdout.readline() == "posted\n"
            wait_for(lambda: left.lane.counters()["writes_received"] > 10, True)
            os.kill(child.pid, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
            left.lane.close()
            left.pair.close()  # from here on the memory is ours alone
            assert 10 < left.lane.counters()["writes_received"] < N_QUEUED - MAX_SEND
            left.bytes[:] = 0xa5
            os.kill(child.pid, signal.SIGCONT)
            failure = json.loads(child.stdout.readline())
            assert (failure["kind"], failure["code"]) == ("completion", 12), failure
            assert child.wait(30) == 0
            assert (left.bytes == 0xa5).all()
        finally:
            child.kill()
    left.close()


def test_threads_and_descriptors_end_with_the_rail():
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    Side("rxe0").close()
    before = counts()
    for _ in range(20):
        Side("rxe0").close()
    wait_for(counts, before)


def test_a_lane_with_writes_outstanding_closes_and_nothing_of_it_arrives_afterwards(proven):
    left, right = proven
    right.expect(1, 0, 0)
    aim(left, right, 1, 0, 0)
    right.lane.close()
    right.pair.close()  # the fence: what is written now finds no queue pair
    right.bytes[:] = 7
    left.bytes[:] = 9
    for _ in range(2 * MAX_SEND):
        left.lane.post(1, 1, 0, left.region.address, NBYTES)
    assert left.lane.counters()["writes_pending"] == 2 * MAX_SEND
    left.lane.close()
    left.pair.close()
    assert left.engine.events(0.05) == []  # who closes is told nothing
    with pytest.raises(ValueError, match="is closed"):
        left.lane.post(1, 1, 0, left.region.address, NBYTES)
    assert (right.bytes == 7).all()


def test_a_post_that_meets_the_close_is_refused_and_touches_nothing(proven):
    left, right = proven
    for slot in range(MAX_RECEIVE):
        right.expect(slot, 0, 0, 4096)
        aim(left, right, slot, 0, 0, 4096)
    started = threading.Event()

    def post_until_closed() -> int:
        for n in range(1_000_000):
            try:
                left.lane.post(n % MAX_RECEIVE, 1 + n // MAX_RECEIVE, 0, left.region.address, 4096)
            except ValueError as exc:
                assert "closed" in str(exc)
                return n
            started.set()
        raise AssertionError("nobody closed the lane")

    with ThreadPoolExecutor(2) as executor:
        posting = [executor.submit(post_until_closed) for _ in range(2)]
        assert started.wait(20)
        left.lane.close()
        left.pair.close()
        assert sum(future.result(20) for future in posting) > 0


def test_a_rail_with_open_lanes_does_not_close(sides):
    with pytest.raises(BufferError, match="1 open lanes"):
        sides[0].rail.close()


def test_a_slot_is_bound_after_the_proof(sides):
    left, _ = sides
    with pytest.raises(ValueError, match="before the peer's proof has come"):
        left.lane.bind(1, left.region.address, left.region.address, NBYTES)


def test_a_forked_child_can_use_nothing_and_harms_nobody(proven):
    left, right = proven
    right.expect(1, 0, NBYTES)
    aim(left, right, 1, 0, NBYTES)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for attempt in (lambda: left.lane.post(1, 1, 0, left.region.address, NBYTES), left.rail.counters,
                        lambda: left.rail.know(4096, 4096, 1), lambda: left.pair.state):
            try:
                attempt()
                said.append("worked")
            except ValueError as exc:
                said.append("forked" if "was forked from" in str(exc) else str(exc))
        left.lane.close()
        left.pair.close()
        left.rail.close()
        os.write(writing, ",".join(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == "forked,forked,forked,forked"
    assert os.waitpid(child, 0)[1] == 0
    left.bytes[:NBYTES] = 5  # written after the fork: the device must see the parent's page
    left.lane.post(1, 1, 0, left.region.address, NBYTES)
    assert left.events(1)[0][0] == native.EVENT_DELIVERED
    wait_for(lambda: right.lane.counters()["writes_received"], 1)
    assert (right.bytes[NBYTES:2 * NBYTES] == 5).all()
