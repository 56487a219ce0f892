"""The rank's port: waits that end in time and say why, copies that overlap with sums."""
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from bpsfast.collective.pipe import LEG
from bpsfast.pyx import port as native, ring
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import ABORTED, DIFFERENT, DONE, NODE_DIED, TICKET, TIMED_OUT, Port, copy
from bpsfast.trace.records import RECORD

BOARD_WORDS = 4096  # where words begin, 64 bytes apart


class Node:
    """The node's half of the shared words, by hand."""

    def __init__(self):
        self.board = bytearray(4096 + 64 * 16)
        self.lane_memory, self.bell = bytearray(256 + 32 * 4), bytearray(ring.DOORBELL_NBYTES)
        ring.format_board(self.board)
        ring.format_lane(self.lane_memory)
        ring.format_doorbell(self.bell)
        self.lane = ring.Lane(self.lane_memory)

    def publish(self, part, round):
        self.board[BOARD_WORDS + 64 * part : BOARD_WORDS + 64 * part + 4] = round.to_bytes(4, "little")

    def abort(self, reason):
        self.board[64 : 64 + len(reason)] = reason
        self.board[4:8] = (1).to_bytes(4, "little")

    def port(self, pidfd=-1, **options):
        return Port(self.lane_memory, self.board, self.bell, pidfd, **options)


@pytest.fixture
def node():
    return Node()


def test_submit_is_one_entry_on_the_lane(node):
    port = node.port()
    port.submit(3, 2, 7, 5, 8192)
    port.submit(1, 1, 2, 0, 0, empty=True)
    assert node.lane.pop() == (3, 2, 7, 0, 5, 8192)
    assert node.lane.pop() == (1, 1, 2, 1, 0, 0)


def test_wait_looks_at_every_partition(node):
    port = node.port()
    node.publish(0, 1)
    assert port.wait(0, 1, 1, 1) == DONE
    assert not port.done(0, 2, 1)
    assert port.wait(0, 2, 1, 0.01) == TIMED_OUT
    node.publish(1, 2)
    assert port.wait(0, 2, 1, 1) == DONE and port.done(0, 2, 1)


def test_rounds_may_wrap(node):
    port = node.port()
    node.publish(0, 3)
    assert port.wait(0, 1, 2**32 - 2, 1) == DONE
    node.publish(0, 2**32 - 2)
    assert not port.done(0, 1, 3)


def test_an_aborted_job_ends_the_wait_with_its_reason(node):
    port = node.port()
    assert port.state() == (0, "")
    node.abort(b"PeerLostError: rank 3 is gone")
    assert port.wait(0, 1, 1, 10) == ABORTED
    assert port.state() == (1, "PeerLostError: rank 3 is gone")


def test_a_result_that_is_there_counts_even_after_an_abort(node):
    port = node.port()
    node.publish(0, 1)
    node.abort(b"late")
    assert port.wait(0, 1, 1, 10) == DONE


def test_the_death_of_the_node_ends_the_wait(node):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    port = node.port(pidfd)
    outcome = []
    waiter = threading.Thread(target=lambda: outcome.append(port.wait(0, 1, 1, 60)))
    waiter.start()
    process.kill()
    waiter.join(30)
    process.wait()
    process.stdin.close()
    os.close(pidfd)
    assert outcome == [NODE_DIED]


def test_a_full_lane_of_a_dead_job_is_an_error_not_a_hang(node):
    port = node.port()
    for part in range(4):
        port.submit(part, 1, 1, 0, 0)
    node.abort(b"PeerLostError: gone")
    with pytest.raises(ConnectionError, match="PeerLostError: gone"):
        port.submit(4, 1, 1, 0, 0)


@pytest.mark.parametrize("how", ["submit", "copy_in"])
def test_a_full_lane_of_a_node_that_hangs_is_an_error_not_a_hang(node, how):
    port = node.port(patience_s=0.3)
    for part in range(4):
        port.submit(part, 1, 1, 0, 0)
    source, target = np.arange(8192, dtype=np.uint8), np.zeros(8192, np.uint8)
    with pytest.raises(native.LaneFull, match=r"full lane for 0\.3 s"):
        if how == "submit":
            port.submit(4, 1, 1, 0, 0)
        else:
            port.copy_in(target.ctypes.data, source.ctypes.data, 8192, 4, 4096, 1, 0, 0)


def test_a_full_lane_does_not_hold_up_signals_and_loses_nothing(node):
    port = node.port()
    for part in range(4):
        port.submit(part, 1, 1, 0, 0)
    source, target = np.arange(3 * 4096, dtype=np.uint8), np.zeros(3 * 4096, np.uint8)
    before = signal.signal(signal.SIGALRM, lambda number, frame: [node.lane.pop() for _ in range(4)])
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        port.copy_in(target.ctypes.data, source.ctypes.data, 3 * 4096, 4, 4096, 1, 0, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [node.lane.pop()[0] for _ in range(3)] == [4, 5, 6] and node.lane.pop() is None
    assert (target == source).all()


def test_a_signal_handler_runs_while_waiting(node):
    """Ctrl-C in a wait must not last until the deadline."""
    port = node.port()

    def handler(number, frame):
        raise InterruptedError("handled")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError, match="handled"):
            port.wait(0, 1, 1, 60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_signals_that_come_faster_than_the_slices_hide_no_death(node):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    port = node.port(pidfd)
    n_handled = 0

    def handler(number, frame):
        nonlocal n_handled
        n_handled += 1
        if n_handled == 3:
            process.kill()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        assert port.wait(0, 1, 1, 20) == NODE_DIED
        assert n_handled >= 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        port.close()
        process.kill()
        process.wait(10)
        process.stdin.close()
        os.close(pidfd)


def test_copy_in_announces_each_partition_after_its_bytes(node):
    with Segment(3 * 4096) as segment:
        source = np.arange(2 * 4096 + 100, dtype=np.uint8)
        node.port().copy_in(segment.address, source.ctypes.data, source.nbytes, 4, 4096, 9, 2, 65536)
        assert [node.lane.pop() for _ in range(3)] == [(4 + i, 1, 9, 0, 2, 65536 + 4096 * i) for i in range(3)]
        assert bytes(memoryview(segment)[: source.nbytes]) == source.tobytes()


def test_stream_in_reuses_a_slot_only_once_its_partition_is_complete(node):
    with Segment(2 * 4096) as segment:
        source = np.random.default_rng(0).integers(0, 256, 3 * 4096 + 100, np.uint8)
        stream = (segment.address, source.ctypes.data, source.nbytes, 4, 4096, 9, 2, 65536, 2)
        port = node.port()
        assert port.stream_in(*stream, 0, 0.01) == (TIMED_OUT, 2)
        assert [node.lane.pop() for _ in range(3)] == [(4, 1, 9, 0, 2, 65536), (5, 1, 9, 0, 2, 65536 + 4096), None]
        assert bytes(memoryview(segment)) == source[: 2 * 4096].tobytes()
        node.publish(5, 9)  # the second before the first: slots are reused in order
        assert port.stream_in(*stream, 2, 0.01) == (TIMED_OUT, 2) and node.lane.pop() is None
        node.publish(4, 9)
        assert port.stream_in(*stream, 2, 10) == (DONE, 4)
        assert [node.lane.pop() for _ in range(2)] == [(6, 1, 9, 0, 2, 65536), (7, 1, 9, 0, 2, 65536 + 4096)]
        assert bytes(memoryview(segment)[:4096]) == source[2 * 4096 : 3 * 4096].tobytes()
        assert bytes(memoryview(segment)[4096 : 4096 + 100]) == source[3 * 4096 :].tobytes()


def test_a_full_lane_ends_a_stream_in_time(node):
    with Segment(8 * 4096) as segment:
        source = np.zeros(8 * 4096, np.uint8)
        port = node.port()
        outcome = port.stream_in(segment.address, source.ctypes.data, source.nbytes, 0, 4096, 1, 0, 0, 8, 0, 0.2)
        assert outcome == (TIMED_OUT, 4)  # the lane of this node holds four entries
        assert [node.lane.pop()[0] for _ in range(4)] == [0, 1, 2, 3]
        outcome = port.stream_in(segment.address, source.ctypes.data, source.nbytes, 0, 4096, 1, 0, 0, 8, 4, 10)
        assert outcome == (DONE, 8)


def test_stream_in_raises_what_ended_the_job(node):
    with Segment(2 * 4096) as segment:
        node.abort(b"PeerLostError: rank 2 is gone")
        source = bytearray(4 * 4096)
        address = np.frombuffer(source, np.uint8).ctypes.data
        with pytest.raises(ConnectionError, match="rank 2 is gone"):
            node.port().stream_in(segment.address, address, len(source), 4, 4096, 9, 2, 0, 2, 0, 60)


def test_deliver_copies_each_partition_once_it_is_published(node):
    with Segment(2 * 4096) as segment:
        memoryview(segment)[:] = bytes(range(256)) * 32
        target = np.zeros(4096 + 77, np.uint8)
        port = node.port()
        node.publish(2, 5)
        assert port.deliver(target.ctypes.data, segment.address, target.nbytes, 2, 4096, 5, 0.01) == TIMED_OUT
        assert bytes(target[:4096]) == bytes(memoryview(segment)[:4096]) and not target[4096:].any()
        node.publish(3, 5)
        assert port.deliver(target.ctypes.data, segment.address, target.nbytes, 2, 4096, 5, 10) == DONE
        assert bytes(target) == bytes(memoryview(segment)[: target.nbytes])


@pytest.mark.parametrize("nbytes", [0, 1, 4095, (1 << 20) + 13, 5 << 20])
@pytest.mark.parametrize("shift", [0, 1, 24])
def test_copy_is_exact_at_any_alignment(nbytes, shift):
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 64, np.uint8)
    target = np.full(nbytes + 128, 7, np.uint8)
    copy(target.ctypes.data + 64 - shift, source.ctypes.data + shift, nbytes)
    assert (target[64 - shift : 64 - shift + nbytes] == source[shift : shift + nbytes]).all()
    assert (target[: 64 - shift] == 7).all() and (target[64 - shift + nbytes :] == 7).all()


def test_partitions_beyond_the_board_are_refused(node):
    port = node.port()
    for part, n in ((16, 1), (15, 2), (0, 17)):
        with pytest.raises(ValueError, match="beyond the board's 16 words"):
            port.submit(part, n, 1, 0, 0)
        with pytest.raises(ValueError, match="beyond"):
            port.wait(part, n, 1, 1)


def test_a_closed_port_refuses_and_releases(node):
    port = node.port()
    with pytest.raises(BufferError):
        node.board.append(0)
    port.close()
    port.close()
    node.board.append(0)
    with pytest.raises(ValueError, match="closed"):
        port.submit(0, 1, 1, 0, 0)


def test_unformatted_buffers_are_refused(node):
    for arguments in ((bytearray(512), node.board, node.bell), (node.lane_memory, bytearray(8192), node.bell),
                      (node.lane_memory, node.board, bytearray(256))):
        with pytest.raises(ValueError, match="no formatted"):
            Port(*arguments, -1)


def test_the_trace_keeps_what_fits(node):
    port = node.port(trace_capacity=2)
    with Segment(4096) as segment:
        for round in range(1, 4):
            node.publish(0, round)
            port.deliver(segment.address, segment.address, 0 or 1, 0, 4096, round, 1)
    assert len(port.trace()) == 2 * 32
    assert native.DONE == 0


def test_the_trace_keeps_the_rounds_that_are_asked_for(node):
    port = node.port(trace_capacity=100, trace_first_round=3, trace_last_round=4)
    for round in range(2, 6):  # the lane holds four
        port.submit(0, 2, round, 0, 0)
    rows = RECORD.iter_unpack(port.trace())
    assert [(part, at, kind, n_parts) for _, _, part, at, kind, _, n_parts in rows] == [(0, 3, 9, 2), (0, 4, 9, 2)]


def words(*numbers):
    return np.array(numbers, np.uint64)


class Convoy:
    """Legs through *n_slots* partitions of 64 bytes, from `source` to `target`; results are written by hand."""

    def __init__(self, n, n_slots, first_part=2):
        self.n, self.n_slots = n, n_slots
        self.source = np.random.default_rng(n).integers(0, 256, 64 * n, np.uint8)
        self.target = np.zeros(64 * n, np.uint8)
        self.staging, self.results = np.zeros(64 * n_slots, np.uint8), np.zeros((2, 64 * n_slots), np.uint8)
        self.legs = np.zeros(n, LEG)
        turns = np.arange(n)
        slots, rounds = turns % n_slots, turns // n_slots + 1
        self.legs["source"], self.legs["destination"] = (
            memory.ctypes.data + 64 * turns for memory in (self.source, self.target))
        self.legs["nbytes"] = 64
        self.legs["staging"] = self.staging.ctypes.data + 64 * slots
        self.legs["result"] = self.results.ctypes.data + (rounds % 2 * n_slots + slots) * 64
        self.legs["offset"], self.legs["segment"] = 4096 + 64 * slots, 3
        self.legs["part"], self.legs["round"] = first_part + slots, rounds

    @property
    def raw(self):
        return self.legs.view(np.uint8)

    def sum_up(self, node, leg):
        """Give out the result of *leg*: what was put in, each byte plus one. Only once is a slot read and written."""
        slot, round = leg % self.n_slots, leg // self.n_slots + 1
        self.results[round % 2, 64 * slot : 64 * slot + 64] = self.staging[64 * slot : 64 * slot + 64] + 1
        node.publish(int(self.legs["part"][leg]), round)


@pytest.mark.parametrize(("n", "n_slots", "ahead"), [(1, 1, 1), (5, 1, 1), (7, 3, 3), (9, 4, 2), (4, 4, 4)])
def test_convey_never_has_more_than_its_window_on_the_way(node, n, n_slots, ahead):
    port, convoy, n_in, n_out, announced = node.port(), Convoy(n, n_slots), 0, 0, []
    for leg in range(n):
        status, n_in, n_out = port.convey(convoy.raw, ahead, n_in, n_out, 0.005)
        assert (status, n_in, n_out) == (TIMED_OUT, min(leg + ahead, n), leg)
        while (entry := node.lane.pop()) is not None:
            announced.append(entry)
        assert len(announced) == n_in
        convoy.sum_up(node, leg)
    assert port.convey(convoy.raw, ahead, n_in, n_out, 10) == (DONE, n, n)
    assert announced == [(2 + i % n_slots, 1, i // n_slots + 1, 0, 3, 4096 + 64 * (i % n_slots)) for i in range(n)]
    assert (convoy.target == convoy.source + 1).all()


def test_convey_takes_out_in_order_whatever_is_complete_first(node):
    port, convoy = node.port(), Convoy(3, 3)
    assert port.convey(convoy.raw, 3, 0, 0, 0.005) == (TIMED_OUT, 3, 0)
    convoy.sum_up(node, 2)
    convoy.sum_up(node, 1)
    assert port.convey(convoy.raw, 3, 3, 0, 0.005) == (TIMED_OUT, 3, 0) and not convoy.target.any()
    convoy.sum_up(node, 0)
    assert port.convey(convoy.raw, 3, 3, 0, 10) == (DONE, 3, 3)
    assert (convoy.target == convoy.source + 1).all()


def test_legs_that_give_or_take_nothing(node):
    port, convoy = node.port(), Convoy(2, 2)
    convoy.legs["source"][0] = convoy.legs["destination"][1] = 0
    convoy.legs["nbytes"][1] = 10
    convoy.staging[:] = 7
    assert port.convey(convoy.raw, 2, 0, 0, 0.005) == (TIMED_OUT, 2, 0)
    assert [node.lane.pop()[3] for _ in range(2)] == [1, 0], "the flag of an empty input"
    assert (convoy.staging[:64] == 7).all() and (convoy.staging[64:74] == convoy.source[64:74]).all()
    assert (convoy.staging[74:] == 7).all(), "no byte more than the leg's"
    convoy.sum_up(node, 0)
    convoy.sum_up(node, 1)
    assert port.convey(convoy.raw, 2, 2, 0, 10) == (DONE, 2, 2)
    assert (convoy.target[:64] == 8).all() and not convoy.target[64:].any()


def test_no_legs_are_done(node):
    assert node.port().convey(np.zeros(0, LEG).view(np.uint8), 3, 0, 0, 0.0) == (DONE, 0, 0)


@pytest.mark.parametrize(("seen", "status"), [((5, 2**64 - 6), DONE), ((4, 2**64 - 6), DIFFERENT), ((0, 0), DIFFERENT)])
def test_a_ticket_says_whether_all_gave_the_same(node, seen, status):
    port, convoy = node.port(), Convoy(2, 2)
    convoy.legs["flags"][0] = TICKET
    assert port.convey(convoy.raw, 2, 0, 0, 0.005)[0] == TIMED_OUT
    convoy.results[1, :16] = words(*seen).view(np.uint8)
    node.publish(2, 1)
    convoy.sum_up(node, 1)
    different = status == DIFFERENT
    assert port.convey(convoy.raw, 2, 2, 0, 10) == (status, 2, 0 if different else 2)
    assert not convoy.target[:64].any(), "a ticket is taken nowhere"
    assert convoy.target[64:].any() != different, "what follows a wrong one is not taken out"


def test_convey_ends_with_what_ended_the_job(node):
    port, convoy = node.port(), Convoy(2, 2)
    node.abort(b"PeerLostError: rank 2 is gone")
    assert port.convey(convoy.raw, 2, 0, 0, 10) == (ABORTED, 2, 0)
    full = Convoy(8, 8)
    assert port.convey(full.raw, 8, 0, 0, 10) == (ABORTED, 2, 0), "the lane holds four, two were there"


def test_convey_ends_with_the_node(node):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    port, convoy, outcome = node.port(pidfd), Convoy(2, 2), []
    waiter = threading.Thread(target=lambda: outcome.append(port.convey(convoy.raw, 2, 0, 0, 60)))
    waiter.start()
    process.kill()
    waiter.join(30)
    process.wait()
    process.stdin.close()
    os.close(pidfd)
    assert outcome == [(NODE_DIED, 2, 0)]


def test_convey_through_a_full_lane_goes_on_or_says_that_the_node_hangs(node):
    port, convoy = node.port(patience_s=0.3), Convoy(6, 6)
    status, n_in, n_out = port.convey(convoy.raw, 6, 0, 0, 0.15)
    assert (status, n_in, n_out) == (TIMED_OUT, 4, 0), "the lane holds four"
    assert [node.lane.pop()[0] for _ in range(4)] == [2, 3, 4, 5]
    for leg in range(6):
        convoy.sum_up(node, leg)
    # what is put in once its round is published takes that result: only the window and the order matter here
    assert port.convey(convoy.raw, 6, n_in, n_out, 10) == (DONE, 6, 6)
    stuck = node.port(patience_s=0.3)
    for part in range(2):
        stuck.submit(part, 1, 1, 0, 0)
    with pytest.raises(native.LaneFull, match=r"full lane for 0\.3 s"):
        stuck.convey(Convoy(1, 1, first_part=9).raw, 1, 0, 0, 60)


def test_a_signal_handler_runs_while_conveying_and_it_goes_on(node):
    port, convoy = node.port(), Convoy(2, 1)

    def handler(number, frame):
        raise InterruptedError("handled")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError, match="handled"):
            port.convey(convoy.raw, 1, 0, 0, 60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert node.lane.pop()[:3] == (2, 1, 1) and node.lane.pop() is None


def test_legs_beyond_the_board_are_refused_before_anything_is_done(node):
    convoy = Convoy(3, 3, first_part=14)
    with pytest.raises(ValueError, match="beyond the board's 16 words"):
        node.port().convey(convoy.raw, 3, 0, 0, 1)
    assert node.lane.pop() is None and not convoy.staging.any()
