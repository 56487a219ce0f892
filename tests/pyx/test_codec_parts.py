"""Compressed parts in one engine: wrong frames of other nodes, results that a loss overtakes, and what retires them."""
from __future__ import annotations

import contextlib
import ctypes
import errno
import threading

import numpy as np
import pytest

from bpsfast import kernels
from bpsfast.kernels.codecs.codec_reference import ReferenceJob, decode
from bpsfast.node.codec_state import part_codec
from bpsfast.orchestration.codec import CodecSpec, frame_nbytes
from bpsfast.pyx import engine as native
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import ABORTED, DONE, TIMED_OUT
from tests.support.engine_node import PART, N

CODEC = CodecSpec(kind="topk", k=10)
ROOM = frame_nbytes(CODEC, N, "float32")


class Coded:
    """A engine_node with one rank and one peer behind a wire; part 0 is owned here, part 1 there."""

    def __init__(self, engine_node, codec=None):
        self.engine_node = v = engine_node(n_ranks=1)
        self.memory = Segment(1 << 20)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.peer = v.engine.add_wire_peer()
        codec = codec or part_codec(CODEC, "float32", N)
        at, stride = self.memory.address, 1 << 16
        kernel = kernels.address("float32")
        v.engine.add_owned(0, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernel, divisor=2, before=[],
                           local=[v.ranks[0]], after=[(self.peer, at)], outputs=(at + stride, at + 2 * stride),
                           shm_peers=[], to_wire=True, codec=codec._replace(frames=(at + 3 * stride, at + 4 * stride)))
        v.engine.add_member(1, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernel, local=[v.ranks[0]],
                            owner=self.peer, partial=(at + 5 * stride, 0, 0), codec=codec._replace(
                                frame=at + 5 * stride, frames=(at + 6 * stride, at + 7 * stride),
                                results=(at + 8 * stride, at + 9 * stride)))
        v.commit()

    def place(self, number, nbytes=ROOM):
        return self.bytes[number << 16:][:nbytes]

    def floats(self, number):
        return self.place(number, PART).view(np.float32)

    def close(self):
        del self.bytes
        self.engine_node.close()
        self.memory.close()


@pytest.fixture
def coded(engine_node):
    made = Coded(engine_node)
    yield made
    made.close()


def framed(data):
    return np.frombuffer(len(data).to_bytes(8, "little") + data, np.uint8)


def test_owner_and_member_make_the_frames_of_the_reading(coded):
    v = coded.engine_node
    mine, theirs = (np.random.default_rng(seed).standard_normal(N).astype(np.float32) for seed in range(2))
    reading = ReferenceJob(CODEC, N, "float32", 2)
    sent = framed(reading.nodes[1].push(theirs))
    coded.place(0, len(sent))[:] = sent
    v.input(0)[:] = mine
    v.ports[0].submit(0, 1, 1, 0, 0)
    v.engine.arrived(coded.peer, 0, 1, 0)
    assert v.ports[0].wait(0, 1, 1, 10) == DONE
    expected = ReferenceJob(CODEC, N, "float32", 2).round([mine, theirs], 2)
    assert coded.floats(2).tobytes() == expected.tobytes()
    [(kind, _, part, round_, _, address, nbytes)] = v.engine.events(10)
    assert (kind, part, round_, address, nbytes) == (native.EVENT_RESULT, 0, 1, coded.memory.address + (4 << 16),
                                                     len(sent))
    v.ports[0].submit(1, 1, 1, 0, PART)
    [(kind, source, part, round_, _, address, nbytes)] = v.engine.events(10)
    assert (kind, source, part, round_) == (native.EVENT_FORWARD, coded.peer, 1, 1)
    frame = coded.place(5, nbytes)
    assert frame.tobytes() == framed(ReferenceJob(CODEC, N, "float32", 1).nodes[0].push(v.input(0)[1])).tobytes()
    coded.place(7, nbytes)[:] = frame
    v.engine.arrived(coded.peer, 1, 1, 0)
    assert v.ports[0].wait(1, 1, 1, 10) == DONE
    assert coded.floats(9).tobytes() == decode(CODEC, frame[8:].tobytes(), N, "float32").tobytes()


@pytest.mark.parametrize("bad", [
    framed(b""), framed(b"x" * 79), framed(np.array([N, 0] * 10, np.uint32).tobytes()),
    np.frombuffer((1 << 40).to_bytes(8, "little"), np.uint8), np.full(8, 255, np.uint8),
], ids=["nothing", "cut off", "an index beyond the end", "longer than its room", "a length of all ones"])
@pytest.mark.parametrize("is_owner", [True, False])
def test_a_frame_that_is_none_is_the_senders_fault(coded, bad, is_owner):
    v = coded.engine_node
    part = 0 if is_owner else 1
    coded.place(0 if is_owner else 7, len(bad))[:] = bad
    v.ports[0].submit(part, 1, 1, 0, 0)
    if not is_owner:
        assert v.engine.events(10)[0][0] == native.EVENT_FORWARD
    v.engine.arrived(coded.peer, part, 1, 0)
    assert v.engine.events(10) == [(native.EVENT_LOST, coded.peer, part, 1, errno.EPROTO, 0, 0)]
    assert not v.ports[0].done(part, 1, 1)


@contextlib.contextmanager
def busy(engine_node):
    """Have both of the engine's threads at work in kernels until this ends; it is frozen then."""
    gate, begun = threading.Event(), threading.Barrier(3)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 6)
    def kernel(*_):
        begun.wait(20)
        gate.wait(20)

    for part in (2, 3):
        engine_node.own(part, kernel=ctypes.cast(kernel, ctypes.c_void_p).value)
    engine_node.commit()
    for part in (2, 3):
        engine_node.ports[0].submit(part, 1, 1, 0, part * PART)
    begun.wait(20)
    try:
        yield
        freezing = threading.Thread(target=engine_node.engine.freeze, args=(20,))
        freezing.start()
        words = "only a frozen engine"
        while words.startswith("only a frozen engine"):
            with pytest.raises(ValueError) as refused:
                engine_node.engine.follow(70000, 0, 0)
            words = str(refused.value).rpartition(": ")[2]
    finally:
        gate.set()
    freezing.join(20)


@pytest.mark.parametrize("is_lent", [True, False])
def test_a_result_that_a_loss_overtakes_is_decoded_if_no_other_copy_comes(coded, is_lent):
    """What a keeper has lent comes once; what the lost owner has sent is dropped for what a keeper sends."""
    v = coded.engine_node
    keeper, new_owner = v.engine.add_wire_peer(), v.engine.add_wire_peer()
    v.ports[0].submit(1, 1, 1, 0, PART)
    nbytes = v.engine.events(10)[0][-1]
    if is_lent:
        v.engine.freeze(5)
        v.engine.detach(coded.peer)
        v.engine.follow(1, new_owner, 1, keeper)
        v.engine.commit(v.engine.generation + 1, range(4))
    with busy(v):
        coded.place(7, nbytes)[:] = frame = coded.place(5, nbytes)
        v.engine.arrived(keeper if is_lent else coded.peer, 1, 1, 0)
    assert v.engine.progress(1) == (1, 0)
    v.engine.detach(new_owner if is_lent else coded.peer)
    v.engine.follow(1, keeper, 1, keeper)
    v.engine.commit(v.engine.generation + 1, range(4))
    if not is_lent:
        assert v.ports[0].wait(1, 1, 1, 0.05) == TIMED_OUT, "a copy comes still, and would be written over what follows"
        v.engine.arrived(keeper, 1, 1, 0)
    assert v.ports[0].wait(1, 1, 1, 10) == DONE
    assert coded.floats(9).tobytes() == decode(CODEC, frame[8:].tobytes(), N, "float32").tobytes()
    v.engine.arrived(keeper, 1, 1, 0)
    assert v.engine.counters()["stale"] == 1
    v.ports[0].submit(1, 1, 2, 0, PART)
    assert v.engine.events(10)[0][:4] == (native.EVENT_FORWARD, keeper, 1, 2)


def test_an_engine_that_cannot_compress_tells_its_ranks_and_its_node(engine_node):
    made = Coded(engine_node, part_codec(CODEC, "float32", N)._replace(room_nbytes=ROOM - 8))
    v = made.engine_node
    try:
        v.ports[0].submit(1, 1, 1, 0, 0)
        assert v.engine.events(10) == [(native.EVENT_LOST, native.NOBODY, 1, 1, errno.EPROTO, 0, 0)]
        assert v.ports[0].wait(1, 1, 1, 10) == ABORTED
        why = "ProtocolError: what was compressed is longer than it can be, in partition 1, round 1"
        assert v.ports[0].state()[1] == v.engine.failure == why
    finally:
        made.close()


@pytest.mark.parametrize("rate", [float("nan"), -1.0, float("inf")])
def test_a_learning_rate_that_is_none_is_the_ranks_fault(coded, rate):
    v = coded.engine_node
    v.ports[0].set_rate(0, 1, 1, rate)
    v.engine.missing(0)  # what ranks announced before counts
    [(kind, source, part, *_)] = v.engine.events(10)
    assert (kind, source, part) == (native.EVENT_LOST, v.ranks[0], 0)


def test_parts_are_retired_with_their_codecs(coded):
    v = coded.engine_node
    v.ports[0].submit(1, 1, 1, 0, 0)
    assert v.engine.events(10)[0][0] == native.EVENT_FORWARD
    with pytest.raises(ValueError, match="part 1 is to be retired while something of it is under way"):
        v.engine.retire([1])
    frame = coded.place(5)
    coded.place(7)[:] = frame
    v.engine.arrived(coded.peer, 1, 1, 0)
    assert v.ports[0].wait(1, 1, 1, 10) == DONE
    v.engine.retire([0, 1])
    with pytest.raises(ValueError, match="part 1 has no codec"):
        v.engine.codec_words(1)
