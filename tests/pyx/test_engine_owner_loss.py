"""An engine when an owner is gone: what it passes on again, takes over, or waits for, and what it hears meanwhile."""
from __future__ import annotations

import ctypes
import errno
import threading

import numpy as np
import pytest

from bpsfast import kernels
from bpsfast.pyx import engine as native, ring
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import DONE, TIMED_OUT
from tests.support.engine_node import PART, N

LAST = (1 << 32) - 1


class NewOwners:
    """A engine_node with a member's part 0, whose owner is `lost`; `peer` and `other` are nodes that are left."""

    def __init__(self, v):
        self.v, self.engine = v, v.engine
        self.lost, self.peer, self.other = (self.engine.add_wire_peer() for _ in range(3))
        self.partial, self.slots = Segment(PART), Segment(2 * PART)
        self.engine.add_member(0, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernels.address("float32"),
                               local=v.ranks, owner=self.lost, partial=(self.partial.address, 3, 64))
        v.commit()

    def push(self, round_, ranks=None, empty=False):
        for rank in range(self.v.n_ranks) if ranks is None else ranks:
            self.v.input(rank)[0] = 10 * rank + round_
            self.v.ports[rank].submit(0, 1, round_, 0, 0, empty=empty)

    def passed_on(self, round_, **push):
        """Let all ranks push *round_*, and return what it was passed on as."""
        self.push(round_, **push)
        (event,) = self.engine.events(10)
        return event

    def round(self, round_):
        """Let *round_* be passed on and completed."""
        self.passed_on(round_)
        self.engine.arrived(self.lost, 0, round_, 0)

    def freeze(self):
        self.engine.freeze(5)
        self.engine.detach(self.lost)

    def own(self, kept_round, before=(), **changes):
        """Own part 0 from now on, *before* it nodes of which the slots begin where ours do."""
        self.v.own(0, before=[(node, self.slots.address + i * PART) for i, node in enumerate(before)],
                   kept_round=kept_round, **changes)

    def commit(self):
        self.engine.commit(self.engine.generation + 1, [0] * self.v.n_parts)

    def slot(self, number):
        return np.frombuffer(self.slots, np.float32).reshape(2, N)[number]


@pytest.fixture
def new_owners(engine_node):
    return lambda n_ranks=1: NewOwners(engine_node(n_ranks=n_ranks, n_parts=2))


# -- what is refused ----------------------------------------------------------------------------------------------

def test_only_a_frozen_engine_changes_owners(new_owners):
    h = new_owners()
    for call in (lambda: h.engine.detach(h.lost), lambda: h.engine.follow(0, h.peer, 0), lambda: h.own(0)):
        with pytest.raises(ValueError, match="only a frozen engine changes owners"):
            call()
    h.round(1)  # and nothing has changed


def test_another_round_or_part_is_refused_and_changes_nothing(new_owners):
    h = new_owners()
    h.round(1)
    h.freeze()
    for kept in (2, LAST, 3):  # it has passed on round 1: 0 or 1 are possible
        with pytest.raises(ValueError, match=f"part 0 after round {kept}: it is at another round here"):
            h.engine.follow(0, h.peer, kept)
        with pytest.raises(ValueError, match="it is at another round here"):
            h.own(kept)
    for part in (1, 70000):
        with pytest.raises(ValueError, match=f"part {part} .*no such part, or it is owned here"):
            h.engine.follow(part, h.peer, 1)
        with pytest.raises(ValueError, match=f"there is no part {part}"):
            h.engine.progress(part)
    assert h.engine.progress(0) == (1, 1)
    h.own(1)
    for call in (lambda: h.engine.follow(0, h.peer, 1), lambda: h.own(1)):
        with pytest.raises(ValueError, match="or it is owned here"):
            call()


# -- passing on again ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("empty", [False, True])
def test_a_member_passes_on_again_what_nobody_has(new_owners, n_ranks, empty):
    h = new_owners(n_ranks)
    h.round(1)
    first = h.passed_on(2, empty=empty)
    assert first[:4] == (native.EVENT_FORWARD, h.lost, 0, 2)
    assert h.engine.progress(0) == (2, 1)
    h.freeze()
    h.engine.follow(0, h.peer, 1)
    h.commit()
    (again,) = h.engine.events(10)
    assert again == (native.EVENT_FORWARD, h.peer, *first[2:])
    address = h.v.inputs[0].address if n_ranks == 1 else h.partial.address
    assert again[4:] == ((1, again[5], 0) if empty else (0, address, PART))
    h.engine.arrived(h.peer, 0, 2, 0)
    assert h.v.ports[0].wait(0, 1, 2, 10) == DONE
    assert h.passed_on(3)[1] == h.peer


def test_what_was_not_passed_on_is_not_passed_on_again(new_owners):
    h = new_owners(2)
    h.round(1)
    h.push(2, ranks=[0])
    h.freeze()
    h.engine.follow(0, h.peer, 1)
    h.commit()
    assert h.engine.events(0.05) == []
    h.push(2, ranks=[1])
    (event,) = h.engine.events(10)
    assert event[1:4] == (h.peer, 0, 2) and (np.frombuffer(h.partial, np.float32) == 14).all()


def test_to_a_node_of_this_host_it_is_announced_again(engine_node):
    v, near = engine_node(n_ranks=1, n_parts=2), engine_node(n_ranks=1)
    there, back = Segment(ring.PEER_LANE_NBYTES, populate=False), Segment(ring.PEER_LANE_NBYTES, populate=False)
    ring.format_lane(there)
    ring.format_lane(back)
    h = NewOwners(v)
    peer = h.engine.add_shm_peer(back, there, near.bell)
    h.passed_on(1)
    h.freeze()
    h.engine.follow(0, peer, 0)
    h.commit()
    assert ring.Lane(there).pop() == (0, 1, 1, 0, 0, 0)
    ring.Lane(back).push(0, 1, 1, 0, 0, 0)
    ring.Doorbell(v.bell).ring()
    assert v.ports[0].wait(0, 1, 1, 10) == DONE


# -- the round that is kept ---------------------------------------------------------------------------------------

def test_a_result_that_is_in_place_is_announced_at_once(new_owners):
    h = new_owners()
    h.passed_on(1)
    h.freeze()
    h.engine.follow(0, h.peer, 1)
    assert h.v.ports[0].done(0, 1, 1) and h.engine.progress(0) == (1, 1)
    h.commit()
    assert h.engine.events(0.05) == []
    assert h.passed_on(2)[1] == h.peer


@pytest.mark.parametrize("keeper_owns", [False, True])
def test_a_result_that_is_lent_counts_when_it_has_come(new_owners, keeper_owns):
    h = new_owners()
    h.passed_on(1)
    h.freeze()
    keeper = h.peer if keeper_owns else h.other
    h.engine.follow(0, h.peer, 1, keeper)
    h.commit()
    assert h.v.ports[0].wait(0, 1, 1, 0.02) == TIMED_OUT
    h.engine.arrived(keeper, 0, 1, 0)
    assert h.v.ports[0].wait(0, 1, 1, 10) == DONE
    assert h.passed_on(2)[1] == h.peer
    h.engine.arrived(keeper, 0, 1, 0)  # once more: nobody waits for it
    assert h.engine.counters()["stale"] == 1 and not h.v.ports[0].done(0, 1, 2)
    h.engine.arrived(h.peer, 0, 2, 0)
    assert h.v.ports[0].wait(0, 1, 2, 10) == DONE


def test_nobody_but_the_keeper_can_lend(new_owners):
    h = new_owners()
    h.passed_on(1)
    h.freeze()
    h.engine.follow(0, h.peer, 1, h.other)
    h.commit()
    third = h.engine.add_wire_peer()
    h.engine.arrived(third, 0, 1, 0)
    assert h.engine.counters()["stale"] == 1 and not h.v.ports[0].done(0, 1, 1)
    h.engine.arrived(third, 0, 2, 0)
    assert h.engine.events(10) == [(native.EVENT_LOST, third, 0, 2, errno.EPROTO, 0, 0)]
    h.engine.arrived(h.other, 0, 1, 0)
    assert h.v.ports[0].wait(0, 1, 1, 10) == DONE


def test_a_loan_may_be_expected_once_more_after_a_second_loss(new_owners):
    """It came while the engine was frozen again, and counts as if it came after the second commit."""
    h = new_owners()
    h.passed_on(1)
    h.freeze()
    h.engine.follow(0, h.peer, 1, h.other)
    h.commit()
    h.engine.freeze(5)
    h.engine.arrived(h.other, 0, 1, 0)
    h.engine.detach(h.peer)
    assert h.engine.progress(0) == (1, 0)
    h.engine.follow(0, h.other, 1, h.other)
    h.commit()
    assert h.v.ports[0].done(0, 1, 1) and h.passed_on(2)[1] == h.other


# -- a member, or nobody, becomes the owner -----------------------------------------------------------------------

@pytest.mark.parametrize("was_passed_on", [False, True])
def test_a_member_owns_with_the_inputs_that_it_has(new_owners, was_passed_on):
    h = new_owners(2)
    h.round(1)
    if was_passed_on:
        h.passed_on(2)
    else:
        h.push(2, ranks=[0])
    h.freeze()
    h.own(1, before=[h.peer])
    h.commit()
    h.slot(0)[:] = 100
    h.engine.arrived(h.peer, 0, 2, 0)
    if not was_passed_on:
        assert h.v.ports[0].wait(0, 1, 2, 0.02) == TIMED_OUT
        h.push(2, ranks=[1])
    assert h.v.ports[0].wait(0, 1, 2, 10) == DONE
    assert (h.v.output(2)[0] == 100 + 2 + 12).all()
    assert h.engine.events(0.02) == [], "nobody is to get it over a wire"


def test_a_member_that_lacks_nobody_sums_at_the_commit(new_owners):
    h = new_owners()
    h.passed_on(1)
    h.freeze()
    h.own(0, to_wire=True)
    h.commit()
    assert h.v.ports[0].wait(0, 1, 1, 10) == DONE
    assert h.engine.events(10)[0][:4] == (native.EVENT_RESULT, 0, 0, 1)


@pytest.mark.parametrize("kept", [0, 7, LAST - 1, LAST])
def test_who_had_nothing_to_do_with_a_part_owns_it_from_any_round_on(new_owners, kept):
    h = new_owners()
    h.freeze()
    h.v.own(1, local=[], before=[(h.peer, h.slots.address)], to_wire=True, kept_round=kept)
    assert h.engine.progress(1) == (kept, kept)
    h.commit()
    for n in (1, 2, 3):
        h.slot(0)[:] = n
        h.engine.arrived(h.peer, 1, (kept + n) % (1 << 32), 0)
        (event,) = h.engine.events(10)
        assert event[:4] == (native.EVENT_RESULT, 0, 1, (kept + n) % (1 << 32))
        assert (h.v.output(kept + n)[1] == n).all()


# -- what comes while it is frozen --------------------------------------------------------------------------------

def test_what_arrives_while_frozen_is_taken_in_at_the_commit(new_owners):
    """A peer that has committed before writes for a part that is not ours yet."""
    h = new_owners()
    h.passed_on(1)
    h.engine.freeze(5)
    h.slot(0)[:] = 4
    h.engine.arrived(h.peer, 0, 1, 0)
    h.engine.detach(h.lost)
    h.own(0, before=[h.peer])
    assert not h.v.ports[0].done(0, 1, 1)
    h.commit()
    assert h.v.ports[0].wait(0, 1, 1, 10) == DONE
    assert (h.v.output(1)[0] == 5).all() and h.engine.counters()["stale"] == 0


def test_what_a_detached_source_has_sent_is_dropped(new_owners):
    h = new_owners()
    h.passed_on(1)
    h.engine.freeze(5)
    h.engine.arrived(h.lost, 0, 1, 0)
    h.engine.arrived(h.lost, 1, 9, 0)  # nonsense, even
    h.engine.detach(h.lost)
    assert h.engine.progress(0) == (1, 0)
    h.engine.follow(0, h.peer, 0)
    h.commit()
    (again,) = h.engine.events(10)
    assert again[:4] == (native.EVENT_FORWARD, h.peer, 0, 1) and not h.v.ports[0].done(0, 1, 1)


def test_more_arrivals_than_there_was_room_for_are_kept(new_owners):
    h = new_owners()
    h.round(1)
    h.freeze()
    for _ in range(1000):
        h.engine.arrived(h.peer, 0, 1, 0)
    h.engine.follow(0, h.peer, 1)
    h.commit()
    h.v.ports[0].submit(0, 1, 2, 0, 0)
    assert h.engine.events(10)[0][1:4] == (h.peer, 0, 2)
    assert h.v.ports[0].done(0, 1, 1)


def test_ranks_are_heard_after_the_commit(new_owners):
    h = new_owners()
    h.freeze()
    h.push(1)
    assert h.engine.events(0.05) == [] and h.engine.progress(0) == (0, 0)
    h.engine.follow(0, h.peer, 0)
    h.commit()
    assert h.engine.events(10)[0][1:4] == (h.peer, 0, 1)


def test_what_came_during_a_freeze_that_failed_is_summed_at_once_while_the_kernel_still_runs(engine_node):
    v = engine_node(n_ranks=1, n_parts=2, n_threads=2)
    bell = ring.Doorbell(v.bell)
    peer, slot, gate, begun = v.engine.add_wire_peer(), Segment(PART), threading.Event(), threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 6)
    def kernel(*_):
        begun.set()
        gate.wait(20)

    def freeze():
        with pytest.raises(TimeoutError, match="1 kernels still run"):
            v.engine.freeze(0.2)

    v.own(0, local=[], before=[(peer, slot.address)])
    v.own(1, kernel=ctypes.cast(kernel, ctypes.c_void_p).value)
    v.commit()
    v.ports[0].submit(1, 1, 1, 0, PART)
    assert begun.wait(20)
    freezing = threading.Thread(target=freeze)
    freezing.start()
    words = "only a frozen engine"
    while "only a frozen engine" in words:
        with pytest.raises(ValueError) as refused:
            v.engine.follow(70000, peer, 0)
        words = str(refused.value)
    n_rings = bell.rings()
    v.engine.arrived(peer, 0, 1, 0)
    freezing.join(20)
    try:
        assert bell.rings() != n_rings, "else a thread that sleeps takes it up to a second later"
        assert v.ports[0].wait(0, 1, 1, 10) == DONE
    finally:
        gate.set()
