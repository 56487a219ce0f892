"""Conveying: chunks of a collective through a few partitions, put in and taken out in order."""
import threading

import numpy as np
import pytest

from bpsfast.pyx import port as native
from bpsfast.pyx.port import ABORTED, DIFFERENT, DONE, FINGERPRINT, NODE_DIED, TIMED_OUT
from bpsfast.trainer.chunk_descriptors import CHUNK_DTYPE
from tests.support.port_node import Node, alarms, interrupt, mortal


@pytest.fixture
def node():
    return Node()


def words(*numbers):
    return np.array(numbers, np.uint64)


class Convoy:
    """Chunks through *n_slots* partitions of 64 bytes, from `source` to `target`; results are written by hand."""

    def __init__(self, n, n_slots, first_part=2):
        self.n, self.n_slots = n, n_slots
        self.source = np.random.default_rng(n).integers(0, 256, 64 * n, np.uint8)
        self.target = np.zeros(64 * n, np.uint8)
        self.staging, self.results = np.zeros(64 * n_slots, np.uint8), np.zeros((2, 64 * n_slots), np.uint8)
        self.chunks = np.zeros(n, CHUNK_DTYPE)
        turns = np.arange(n)
        slots, rounds = turns % n_slots, turns // n_slots + 1
        self.chunks["source"], self.chunks["destination"] = (
            memory.ctypes.data + 64 * turns for memory in (self.source, self.target))
        self.chunks["nbytes"] = 64
        self.chunks["staging"] = self.staging.ctypes.data + 64 * slots
        self.chunks["result"] = self.results.ctypes.data + (rounds % 2 * n_slots + slots) * 64
        self.chunks["offset"], self.chunks["segment"] = 4096 + 64 * slots, 3
        self.chunks["part"], self.chunks["round"] = first_part + slots, rounds

    @property
    def raw(self):
        return self.chunks.view(np.uint8)

    def sum_up(self, node, chunk):
        """Give out the result of *chunk*: what was put in, each byte plus one. Only once is a slot read and written."""
        slot, round = chunk % self.n_slots, chunk // self.n_slots + 1
        self.results[round % 2, 64 * slot : 64 * slot + 64] = self.staging[64 * slot : 64 * slot + 64] + 1
        node.publish(int(self.chunks["part"][chunk]), round)


@pytest.mark.parametrize(("n", "n_slots", "ahead"), [(1, 1, 1), (5, 1, 1), (7, 3, 3), (9, 4, 2), (4, 4, 4)])
def test_convey_never_has_more_than_its_window_on_the_way(node, n, n_slots, ahead):
    port, convoy, n_in, n_out, announced = node.port(), Convoy(n, n_slots), 0, 0, []
    for chunk in range(n):
        status, n_in, n_out = port.pipelined_transfer(convoy.raw, ahead, n_in, n_out, 0.005)
        assert (status, n_in, n_out) == (TIMED_OUT, min(chunk + ahead, n), chunk)
        while (entry := node.lane.pop()) is not None:
            announced.append(entry)
        assert len(announced) == n_in
        convoy.sum_up(node, chunk)
    assert port.pipelined_transfer(convoy.raw, ahead, n_in, n_out, 10) == (DONE, n, n)
    assert announced == [(2 + i % n_slots, 1, i // n_slots + 1, 0, 3, 4096 + 64 * (i % n_slots)) for i in range(n)]
    assert (convoy.target == convoy.source + 1).all()


def test_convey_takes_out_in_order_whatever_is_complete_first(node):
    port, convoy = node.port(), Convoy(3, 3)
    assert port.pipelined_transfer(convoy.raw, 3, 0, 0, 0.005) == (TIMED_OUT, 3, 0)
    convoy.sum_up(node, 2)
    convoy.sum_up(node, 1)
    assert port.pipelined_transfer(convoy.raw, 3, 3, 0, 0.005) == (TIMED_OUT, 3, 0) and not convoy.target.any()
    convoy.sum_up(node, 0)
    assert port.pipelined_transfer(convoy.raw, 3, 3, 0, 10) == (DONE, 3, 3)
    assert (convoy.target == convoy.source + 1).all()


def test_the_node_is_called_once_for_all_that_is_put_in_at_once(node):
    port, convoy = node.port(), Convoy(6, 4)
    assert port.pipelined_transfer(convoy.raw, 4, 0, 0, 0.005) == (TIMED_OUT, 4, 0) and node.rings == 1
    for _ in range(4):
        node.lane.pop()
    convoy.sum_up(node, 0)
    convoy.sum_up(node, 1)
    assert port.pipelined_transfer(convoy.raw, 4, 4, 0, 0.005) == (TIMED_OUT, 6, 2) and node.rings == 2


def test_chunks_that_give_or_take_nothing(node):
    port, convoy = node.port(), Convoy(2, 2)
    convoy.chunks["source"][0] = convoy.chunks["destination"][1] = 0
    convoy.chunks["nbytes"][1] = 10
    convoy.staging[:] = 7
    assert port.pipelined_transfer(convoy.raw, 2, 0, 0, 0.005) == (TIMED_OUT, 2, 0)
    assert [node.lane.pop()[3] for _ in range(2)] == [1, 0], "the flag of an empty input"
    assert (convoy.staging[:64] == 7).all() and (convoy.staging[64:74] == convoy.source[64:74]).all()
    assert (convoy.staging[74:] == 7).all(), "no byte more than the chunk's"
    convoy.sum_up(node, 0)
    convoy.sum_up(node, 1)
    assert port.pipelined_transfer(convoy.raw, 2, 2, 0, 10) == (DONE, 2, 2)
    assert (convoy.target[:64] == 8).all() and not convoy.target[64:].any()


def test_no_chunks_are_done(node):
    assert node.port().pipelined_transfer(np.zeros(0, CHUNK_DTYPE).view(np.uint8), 3, 0, 0, 0.0) == (DONE, 0, 0)


@pytest.mark.parametrize(("seen", "status"), [((5, 2**64 - 6), DONE), ((4, 2**64 - 6), DIFFERENT), ((0, 0), DIFFERENT)])
def test_a_fingerprint_says_whether_all_gave_the_same(node, seen, status):
    port, convoy = node.port(), Convoy(2, 2)
    convoy.chunks["flags"][0] = FINGERPRINT
    assert port.pipelined_transfer(convoy.raw, 2, 0, 0, 0.005)[0] == TIMED_OUT
    convoy.results[1, :16] = words(*seen).view(np.uint8)
    node.publish(2, 1)
    convoy.sum_up(node, 1)
    different = status == DIFFERENT
    assert port.pipelined_transfer(convoy.raw, 2, 2, 0, 10) == (status, 2, 0 if different else 2)
    assert not convoy.target[:64].any(), "a fingerprint is taken nowhere"
    assert convoy.target[64:].any() != different, "what follows a wrong one is not taken out"


def test_convey_ends_with_what_ended_the_job(node):
    port, convoy = node.port(), Convoy(2, 2)
    node.abort(b"PeerLostError: rank 2 is gone")
    assert port.pipelined_transfer(convoy.raw, 2, 0, 0, 10) == (ABORTED, 2, 0)
    full = Convoy(8, 8)
    assert port.pipelined_transfer(full.raw, 8, 0, 0, 10) == (ABORTED, 2, 0), "the lane holds four, two were there"


def test_convey_ends_with_the_node(node):
    with mortal() as (process, pidfd):
        port, convoy, outcome = node.port(pidfd), Convoy(2, 2), []
        waiter = threading.Thread(target=lambda: outcome.append(port.pipelined_transfer(convoy.raw, 2, 0, 0, 60)))
        waiter.start()
        process.kill()
        waiter.join(30)
    assert outcome == [(NODE_DIED, 2, 0)]


def test_convey_through_a_full_lane_goes_on_or_says_that_the_node_hangs(node):
    port, convoy = node.port(patience_s=0.3), Convoy(6, 6)
    status, n_in, n_out = port.pipelined_transfer(convoy.raw, 6, 0, 0, 0.15)
    assert (status, n_in, n_out) == (TIMED_OUT, 4, 0), "the lane holds four"
    assert [node.lane.pop()[0] for _ in range(4)] == [2, 3, 4, 5]
    for chunk in range(6):
        convoy.sum_up(node, chunk)
    # what is put in once its round is published takes that result: only the window and the order matter here
    assert port.pipelined_transfer(convoy.raw, 6, n_in, n_out, 10) == (DONE, 6, 6)
    stuck = node.port(patience_s=0.3)
    for part in range(2):
        stuck.submit(part, 1, 1, 0, 0)
    with pytest.raises(native.LaneFull, match=r"full lane for 0\.3 s"):
        stuck.pipelined_transfer(Convoy(1, 1, first_part=9).raw, 1, 0, 0, 60)


def test_a_signal_handler_runs_while_conveying_and_it_goes_on(node):
    port, convoy = node.port(), Convoy(2, 1)
    with alarms(interrupt, 0.05), pytest.raises(InterruptedError, match="handled"):
        port.pipelined_transfer(convoy.raw, 1, 0, 0, 60)
    assert node.lane.pop()[:3] == (2, 1, 1) and node.lane.pop() is None


def test_chunks_beyond_the_board_are_refused_before_anything_is_done(node):
    convoy = Convoy(3, 3, first_part=14)
    with pytest.raises(ValueError, match="beyond the board's 16 words"):
        node.port().pipelined_transfer(convoy.raw, 3, 0, 0, 1)
    assert node.lane.pop() is None and not convoy.staging.any()
