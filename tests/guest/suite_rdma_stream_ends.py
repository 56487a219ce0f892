"""Streams that end: a peer that is gone, stopped or closed, a rail that is in use, a fork; nothing is written later.

Runs in the guest: two rails, rxe0 and rxe1, in one process or in two.
"""
from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from bpsfast.pyx import engine as native
from bpsfast.pyx.rdma import Rail, Stream
from tests.guest.stream_side import MAX_RECEIVE, MAX_SEND, NBYTES, Side, aim, connected, prove, wait_for
from tests.guest.verbs_end import kernel_objects


@pytest.fixture
def sides():
    with connected() as made:
        yield made


@pytest.fixture
def proven(sides):
    return prove(sides)


def test_a_peer_that_is_gone_is_reported_once_after_the_retries(proven):
    left, right = proven
    right.expect(1, 0, 0)
    aim(left, right, 1, 0, 0)
    right.pair.to_error()
    left.stream.post(1, 1, 0, left.region.address, NBYTES)
    left.stream.post(1, 2, 0, left.region.address, NBYTES)
    [(kind, source, *_)] = left.events(1)
    assert (kind, source) == (native.EVENT_LOST, left.source)
    assert left.stream.failure()["code"] == 12  # retries exceeded, not the flush of what stood behind it
    assert left.engine.events(0.05) == []


def test_a_proof_without_a_peer_fails_in_time(sides):
    left, right = sides
    right.stream.close()
    right.pair.close()
    assert not left.stream.prove(20)
    assert left.stream.failure()["kind"] == "completion"
    left.start()
    assert left.events(1)[0][0] == native.EVENT_LOST


N_QUEUED = 3000


def write_and_wait_for_the_end() -> None:
    """Be the process that is stopped: post writes of 5s to the parent, say so, and say at last what became of them."""
    side = Side("rxe1")
    number, psn, gid = side.place
    print(json.dumps([number, psn, gid.hex()]), flush=True)
    number, psn, gid, address, rkey = json.loads(input())
    side.connect(number, psn, bytes.fromhex(gid), rnr_retry=7)
    print("connected", flush=True)
    assert side.stream.prove(30)
    side.start()
    input()
    side.bytes[:] = 5
    side.stream.aim(1, address, address + NBYTES, NBYTES, rkey)
    for round_ in range(1, N_QUEUED + 1):
        side.stream.post(1, round_, 0, side.region.address, NBYTES)
    print("posted", flush=True)
    while side.events(1)[-1][0] != native.EVENT_LOST:
        continue
    print(json.dumps(side.stream.failure()), flush=True)
    side.close()


def test_a_stopped_peer_that_was_cut_off_writes_nothing_when_it_goes_on():
    program = "from tests.guest.suite_rdma_stream_ends import *; write_and_wait_for_the_end()"
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
            assert child.stdout.readline() == "connected\n", "who proves to a pair that is not there gives up in 4 s"
            assert left.stream.prove(30)
            left.start()
            left.expect(1, 0, NBYTES)
            say("go")
            assert child.stdout.readline() == "posted\n"
            wait_for(lambda: left.stream.counters()["writes_received"] > 10, True)
            os.kill(child.pid, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
            left.stream.close()
            left.pair.close()  # from here on the memory is ours alone
            assert 10 < left.stream.counters()["writes_received"] < N_QUEUED - MAX_SEND
            left.bytes[:] = 0xa5
            os.kill(child.pid, signal.SIGCONT)
            failure = json.loads(child.stdout.readline())
            # nobody answered any more (12), or the queue pair refused the rest of a write as it was closed (9)
            assert failure["kind"] == "completion" and failure["code"] in (9, 12), failure
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


def test_a_queue_pair_that_tries_for_ever_ends_in_words_and_idleness_is_no_silence():
    made = left, right = Side("rxe0", patience_s=2.0), Side("rxe1")
    left.connect(*right.place, timeout=0)  # no limit
    right.connect(*left.place)
    prove([left, right])
    right.expect(1, 0, 0)
    aim(left, right, 1, 0, 0)
    assert left.engine.events(3.0) == []
    left.stream.post(1, 1, 0, left.region.address, NBYTES)
    assert [event[0] for event in left.events(1)] == [native.EVENT_DELIVERED]
    right.stream.close()
    right.pair.close()
    left.stream.post(1, 2, 0, left.region.address, NBYTES)
    assert [event[0] for event in left.events(1)] == [native.EVENT_LOST]
    failure = left.stream.failure()
    assert (failure["kind"], failure["slot"], failure["round"], failure["nbytes"]) == ("silence", 1, 2, NBYTES)
    assert failure["code"] >= 2
    for side in made:
        side.close()


def test_a_peer_that_never_posts_a_receive_request_ends_in_silence():
    with connected(rnr_retry=7, timeout=17, patience_s=2.0) as sides:
        left, right = prove(sides)
        aim(left, right, 1, 0, 0)  # the peer has bound nothing
        left.stream.post(1, 1, 0, left.region.address, NBYTES)
        assert [event[0] for event in left.events(1)] == [native.EVENT_LOST]
        failure = left.stream.failure()
        assert (failure["kind"], failure["slot"], failure["round"]) == ("silence", 1, 1)


class Witness:
    """Says, when it goes, what `look` finds."""

    def __init__(self, look: Callable[[], object], said: list[object]) -> None:
        self._look, self._said = look, said

    def __del__(self) -> None:
        self._said.append(self._look())


class Job:
    """What a program dropped: it refers to itself, so that only the collector can end it."""

    def __init__(self, **parts: object) -> None:
        self.itself = self
        self.__dict__ |= parts


def test_of_a_dropped_job_the_collector_ends_stream_and_rail_before_what_they_use(verbs):
    def open_streams() -> str:
        try:
            rail.close()
        except BufferError as exc:
            return str(exc)
        return "none"

    def n_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    objects, threads = kernel_objects(), n_threads()
    device = verbs.Device("rxe0")
    queue = verbs.CompletionQueue(device, 64, events=True)
    pair = verbs.QueuePair(verbs.ProtectionDomain(device), queue, queue, max_send=8, max_recv=8)
    pair.to_init(1)
    rail = Rail(queue.handle, keep=queue)
    said: list[object] = []
    stream = Stream(rail, pair.handle, epoch=1, n_slots=1, max_send=8, max_receive=8,
                keep=(pair, Witness(open_streams, said)))
    Job(stream=stream, pair=pair)
    del stream, pair
    gc.collect()
    assert said == ["none"]
    rail = None
    wait_for(n_threads, threads)
    rail = Rail(queue.handle, keep=(queue, Witness(n_threads, said)))
    Job(rail=rail, queue=queue, device=device)
    del queue, device
    rail = None
    gc.collect()
    gc.collect()  # a queue that knows its queue pairs
    assert said == ["none", threads]
    assert kernel_objects() == objects


def test_a_stream_with_writes_outstanding_closes_and_nothing_of_it_arrives_afterwards(proven):
    left, right = proven
    right.expect(1, 0, 0)
    aim(left, right, 1, 0, 0)
    right.stream.close()
    right.pair.close()  # the fence: what is written now finds no queue pair
    right.bytes[:] = 7
    left.bytes[:] = 9
    for _ in range(2 * MAX_SEND):
        left.stream.post(1, 1, 0, left.region.address, NBYTES)
    assert left.stream.counters()["writes_pending"] == 2 * MAX_SEND
    left.stream.close()
    left.pair.close()
    assert left.engine.events(0.05) == []  # who closes is told nothing
    with pytest.raises(ValueError, match="is closed"):
        left.stream.post(1, 1, 0, left.region.address, NBYTES)
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
                left.stream.post(n % MAX_RECEIVE, 1 + n // MAX_RECEIVE, 0, left.region.address, 4096)
            except ValueError as exc:
                assert "closed" in str(exc)
                return n
            started.set()
        raise AssertionError("nobody closed the stream")

    with ThreadPoolExecutor(2) as executor:
        posting = [executor.submit(post_until_closed) for _ in range(2)]
        assert started.wait(20)
        left.stream.close()
        left.pair.close()
        assert sum(future.result(20) for future in posting) > 0


def test_a_rail_with_open_streams_does_not_close(sides):
    with pytest.raises(BufferError, match="1 open streams"):
        sides[0].rail.close()


def test_a_forked_child_can_use_nothing_and_harms_nobody(proven):
    left, right = proven
    right.expect(1, 0, NBYTES)
    aim(left, right, 1, 0, NBYTES)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for attempt in (lambda: left.stream.post(1, 1, 0, left.region.address, NBYTES), left.rail.counters,
                        lambda: left.rail.know(4096, 4096, 1), lambda: left.pair.state):
            try:
                attempt()
                said.append("worked")
            except ValueError as exc:
                said.append("forked" if "was forked from" in str(exc) else str(exc))
        left.stream.close()
        left.pair.close()
        left.rail.close()
        os.write(writing, ",".join(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == "forked,forked,forked,forked"
    assert os.waitpid(child, 0)[1] == 0
    left.bytes[:NBYTES] = 5  # written after the fork: the device must see the parent's page
    left.stream.post(1, 1, 0, left.region.address, NBYTES)
    assert left.events(1)[0][0] == native.EVENT_DELIVERED
    wait_for(lambda: right.stream.counters()["writes_received"], 1)
    assert (right.bytes[NBYTES:2 * NBYTES] == 5).all()
