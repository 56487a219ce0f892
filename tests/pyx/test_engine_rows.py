"""Rows in the engine (`pyx/rows.h`): merges like the reference, room that ends, lengths on wires, malformed frames."""
from __future__ import annotations

import errno

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast import kernels
from bpsfast.base.dtypes import NAMES, TABLE
from bpsfast.base.reference_sum import reduce_rows
from bpsfast.orchestration.placement.partition import HEADER_NBYTES, row_frame_nbytes
from bpsfast.pyx import engine as native
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import DONE, TIMED_OUT
from bpsfast.trainer.sparse_table import RowFrames
from tests.support.engine_node import PART, EngineNode

N_ROWS, ELEMENTS = 90, 5


def frames_of(dtype="float32", frame_rows=60):
    frames = RowFrames(N_ROWS, (ELEMENTS,), TABLE[dtype].numpy, 1, frame_rows, PART)
    assert row_frame_nbytes(frame_rows, frames.row_nbytes) <= PART
    return frames


def rows_of(frames):
    """Return what the engine has to know of *frames*."""
    return frames.n_rows, frames.frame_rows, ELEMENTS, frames.row_nbytes


def bytes_of(segment):
    return np.frombuffer(segment, np.uint8)


def drawn(seed, dtype, n):
    """Return n rows, some of whose elements are special."""
    draw = np.random.default_rng(seed)
    indices = np.sort(draw.choice(N_ROWS, n, replace=False)).astype(np.int64)
    values = draw.integers(-100, 100, (n, ELEMENTS))
    if TABLE[dtype].is_float:
        values = values / 7
        values[draw.random(values.shape) < 0.05] = -0.0
        values[draw.random(values.shape) < 0.02] = np.nan
    return indices, values.astype(TABLE[dtype].numpy)


class Owner(EngineNode):
    """A engine_node that owns part 0 of a table, which nodes before and after it push by wire."""

    def __init__(self, frames, n_before=0, n_local=1, n_after=0, divisor=1, to_wire=False):
        super().__init__(n_ranks=n_local, n_parts=1)
        self.frames = frames
        self.slots = [Segment(PART) for _ in range(n_before + n_after)]
        self.peers = [self.engine.add_wire_peer() for _ in self.slots]
        wired = [(peer, slot.address) for peer, slot in zip(self.peers, self.slots)]
        self.own(0, before=wired[:n_before], after=wired[n_before:], divisor=divisor, to_wire=to_wire,
                 rows=rows_of(frames), kernel=kernels.address(str(frames.dtype)))
        self.commit()
        self.round = 0

    def push(self, of_peers, of_ranks):
        """Push (indices, values) of each peer and each rank; None: nothing."""
        self.round += 1
        for peer, slot, given_ in zip(self.peers, self.slots, of_peers):
            if given_ is not None:
                self.frames.write(bytes_of(slot), *given_)
            self.engine.arrived(peer, 0, self.round, native.FLAG_EMPTY if given_ is None else 0)
        for port, segment, given_ in zip(self.ports, self.inputs, of_ranks):
            if given_ is not None:
                self.frames.write(bytes_of(segment), *given_)
            port.submit(0, 1, self.round, 0, 0, empty=given_ is None)

    def result(self):
        assert self.ports[0].wait(0, 1, self.round, 10) == DONE
        return bytes_of(self.outputs)[self.round % 2 * PART :][:PART]


@settings(max_examples=150, deadline=None)
@given(dtype=st.sampled_from(NAMES), counts=st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 2)),
       average=st.booleans(), data=st.data())
def test_merges_have_the_bits_of_the_reference(dtype, counts, average, data):
    """Some push nothing; those who do count in the divisor like the others."""
    n_before, n_local, _ = counts
    given_ = [data.draw(st.one_of(st.none(), st.integers(0, 30))) for _ in range(sum(counts))]
    pushed = [None if n is None else drawn((i, n), dtype, n) for i, n in enumerate(given_)]
    peers, ranks = pushed[:n_before] + pushed[n_before + n_local :], pushed[n_before : n_before + n_local]
    v = Owner(frames_of(dtype, N_ROWS), *counts, divisor=sum(counts) if average else 1)
    try:
        v.push(peers, ranks)
        indices, values = v.frames.read(v.result())
        nothing = np.empty(0, np.int64), np.empty((0, ELEMENTS), TABLE[dtype].numpy)
        rows = [nothing if each is None else each for each in pushed]
        if sum(len(each) for each, _ in rows) == 0:
            assert len(indices) == len(values) == 0
            return
        nodes = [*([each] for each in rows[:n_before]), rows[n_before : n_before + n_local],
                 *([each] for each in rows[n_before + n_local :])]
        expected, sums = reduce_rows(nodes, average)
        assert indices.tolist() == expected.tolist() and values.tobytes() == sums.tobytes()
    finally:
        v.close()


def test_a_result_leaves_with_its_own_length(node_of):
    v = node_of(frames_of(), n_after=1, to_wire=True)
    v.push([drawn(1, "float32", 3)], [drawn(2, "float32", 4)])
    indices, _ = v.frames.read(v.result())
    nbytes = row_frame_nbytes(len(indices), ELEMENTS * 4)
    assert v.engine.events(10) == [(native.EVENT_RESULT, 0, 0, 1, 0, v.outputs.address + PART, nbytes)]
    counters = v.engine.counters()
    assert counters["published_bytes"] == nbytes
    assert counters["bytes_summed"] == row_frame_nbytes(3, 20) + row_frame_nbytes(4, 20)
    assert v.engine.pushed_nbytes(v.peers[0]) == row_frame_nbytes(3, 20)
    assert v.engine.pushed_nbytes(v.ranks[0]) == row_frame_nbytes(4, 20)


def test_rounds_without_rows(node_of):
    v = node_of(frames_of(), n_local=2)
    for given_ in ([drawn(1, "float32", 50), None], [None, None], [None, drawn(2, "float32", 1)]):
        v.push([], given_)
        indices, _ = v.frames.read(v.result())
        assert len(indices) == sum(len(each[0]) for each in given_ if each is not None)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_member_forwards_the_length_of_its_partial(node_of, n_ranks):
    frames = frames_of()
    v = EngineNode(n_ranks=n_ranks, n_parts=1)
    try:
        owner, partial = v.engine.add_wire_peer(), Segment(PART)
        v.engine.add_member(0, nbytes=PART, n_elements=0, unit_offset=0, kernel=kernels.address("float32"),
                            local=v.ranks, owner=owner, partial=(partial.address, 3, 0), rows=rows_of(frames))
        v.commit()
        for rank in range(n_ranks):
            frames.write(bytes_of(v.inputs[rank]), *drawn(rank, "float32", 20))
            v.ports[rank].submit(0, 1, 1, 0, 0)
        where = partial if n_ranks > 1 else v.inputs[0]
        ((kind, source, part, round_, flags, address, nbytes),) = v.engine.events(10)
        assert (kind, source, part, round_, flags) == (native.EVENT_FORWARD, owner, 0, 1, 0)
        indices, _ = frames.read(bytes_of(where))
        assert (address, nbytes) == (where.address, row_frame_nbytes(len(indices), 20))
        assert len(indices) == 20 if n_ranks == 1 else len(indices) > 20
        v.engine.arrived(owner, 0, 1, 0)
        assert v.ports[0].wait(0, 1, 1, 10) == DONE
    finally:
        v.close()


def test_a_sum_that_has_no_room_says_how_much_it_needs(node_of):
    v = node_of(frames_of(frame_rows=30), n_local=2)
    first, second = drawn(1, "float32", 25), drawn(2, "float32", 20)
    v.push([], [first, second])
    assert v.frames.needed(v.result()) == 45, "at most, since no room was left to count"
    v.push([], [first, None])
    assert v.frames.needed(v.result()) == 0
    v.push([], [drawn(1, "float32", 80), drawn(2, "float32", 30)])
    assert v.frames.needed(v.result()) == N_ROWS, "an input that had no room itself"


def broken(change):
    """Return a frame of three rows with *change* made to its head and indices."""
    frame = np.zeros(PART, np.uint8)
    frames_of().write(frame, np.array([3, 5, 80]), np.ones((3, ELEMENTS), np.float32))
    change(frame[:HEADER_NBYTES].view(np.uint64), frame[HEADER_NBYTES:].view(np.uint32))
    return frame


BROKEN = {
    "too short": lambda head, indices: head.__setitem__(0, 8),
    "too long": lambda head, indices: head.__setitem__(0, 999),
    "far too long": lambda head, indices: head.__setitem__(0, (1 << 64) - 1),
    "more rows than room": lambda head, indices: head.__setitem__(slice(None), (row_frame_nbytes(61, 20) - 8, 61, 0)),
    "rows without end": lambda head, indices: head.__setitem__(1, 1 << 62),
    "unknown flags": lambda head, indices: head.__setitem__(2, 3),
    "an overflow of more than all": lambda head, indices: head.__setitem__(slice(None), (16, 91, 1)),
    "descending": lambda head, indices: indices.__setitem__(1, 2),
    "twice": lambda head, indices: indices.__setitem__(1, 3),
    "outside": lambda head, indices: indices.__setitem__(2, 90),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_who_sends_what_is_no_frame_is_named_and_nothing_is_published(node_of, change):
    v = node_of(frames_of(), n_before=1, n_local=2)
    frame = broken(change)
    bytes_of(v.slots[0])[:] = frame
    v.engine.arrived(v.peers[0], 0, 1, 0)
    v.ports[0].submit(0, 1, 1, 0, 0, empty=True)
    bytes_of(v.inputs[1])[:] = broken(lambda head, indices: None)
    v.ports[1].submit(0, 1, 1, 0, 0)
    assert v.engine.events(10) == [(native.EVENT_LOST, v.peers[0], 0, 1, errno.EPROTO, 0, 0)]
    assert v.ports[0].wait(0, 1, 1, 0.05) == TIMED_OUT


def test_a_length_that_cannot_be_is_not_forwarded(node_of):
    v = EngineNode(n_ranks=1, n_parts=1)
    try:
        owner = v.engine.add_wire_peer()
        v.engine.add_member(0, nbytes=PART, n_elements=0, unit_offset=0, kernel=kernels.address("float32"),
                            local=v.ranks, owner=owner, partial=(0, 0, 0), rows=rows_of(frames_of()))
        v.commit()
        bytes_of(v.inputs[0])[:8].view(np.uint64)[0] = PART - 7
        v.ports[0].submit(0, 1, 1, 0, 0)
        assert v.engine.events(10) == [(native.EVENT_LOST, v.ranks[0], 0, 1, errno.EPROTO, 0, 0)]
    finally:
        v.close()


@settings(max_examples=300, deadline=None)
@given(noise=st.lists(st.tuples(st.integers(0, HEADER_NBYTES + 60 * 4 - 1), st.integers(0, 255)), max_size=12),
       n=st.integers(0, 60))
def test_noise_never_leaves_the_room_of_the_output(noise, n):
    """The page behind the output keeps its bytes; what is published is a frame."""
    frames = frames_of()
    v = EngineNode(n_ranks=2, n_parts=1)
    try:
        wide = Segment(2 * PART)
        bytes_of(wide)[:] = 0xAA
        v.own(0, rows=rows_of(frames), outputs=(wide.address, wide.address))
        v.commit()
        for rank in range(2):
            frames.write(bytes_of(v.inputs[rank]), *drawn(rank, "float32", n if rank else 10))
        for place, value in noise:
            bytes_of(v.inputs[1])[place] = value
        for port in v.ports:
            port.submit(0, 1, 1, 0, 0)
        lost = []
        for _ in range(1000):
            if lost or v.ports[0].wait(0, 1, 1, 0.01) == DONE:
                break
            lost = v.engine.events(0.0)
        assert v.ports[0].done(0, 1, 1) or lost[0][:2] == (native.EVENT_LOST, v.ranks[1])
        assert (bytes_of(wide)[PART:] == 0xAA).all()
        if not lost and not frames.needed(bytes_of(wide)):
            frames.read(bytes_of(wide))
    finally:
        v.close()


def test_a_part_without_room_for_its_frames_is_refused(node_of):
    v = node_of(frames_of())
    with pytest.raises(ValueError, match="no room for a frame"):
        v.own(0, nbytes=256, rows=(N_ROWS, 60, ELEMENTS, 20))
    with pytest.raises(ValueError, match="no room for a frame"):
        v.own(0, rows=(N_ROWS, 60, ELEMENTS, 0))


@pytest.fixture
def node_of():
    """Make owners that are closed at the end of the test."""
    made = []

    def make(*arguments, **options):
        made.append(Owner(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
