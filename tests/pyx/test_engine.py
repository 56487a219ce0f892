"""The engine: right sums whatever the order of arrival, policy order, rounds, generations, and errors as events."""
import errno
import gc
import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast import kernels
from bpsfast.base.reference_sum import reduce
from bpsfast.pyx import engine as native, ring
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import DONE, TIMED_OUT
from tests.support.engine_node import PART, EngineNode, N


def test_the_sum_is_published_when_the_last_rank_has_arrived(engine_node):
    v = engine_node(n_ranks=3)
    for part in range(4):
        v.own(part, divisor=3)
    v.commit()
    for rank in range(3):
        v.input(rank)[:] = np.float32(rank + 0.1)
    for rank in range(2):
        v.ports[rank].submit(0, 4, 1, 0, 0)
    assert v.ports[0].wait(0, 1, 1, 0.05) == TIMED_OUT
    assert v.engine.missing(0) == (1, [v.ranks[2]], True)
    v.ports[2].submit(0, 4, 1, 0, 0)
    assert v.ports[0].wait(0, 4, 1, 10) == DONE
    assert v.ports[1].done(0, 4, 1)
    expected = reduce([[v.input(rank).ravel() for rank in range(3)]], average=True)
    assert v.output(1).ravel().tobytes() == expected.tobytes()
    assert v.engine.counters()["bytes_summed"] == 3 * 4 * PART


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(list(itertools.product(range(3), range(4)))), threads=st.integers(1, 4))
def test_bits_do_not_depend_on_the_order_of_arrival(order, threads):
    v = EngineNode(n_ranks=3, n_threads=threads)
    try:
        for rank in range(3):
            v.input(rank)[:] = np.random.default_rng(rank).standard_normal((4, N), np.float32)
        for part in range(4):
            v.own(part, divisor=3)
        v.commit()
        for rank, part in order:
            v.ports[rank].submit(part, 1, 1, 0, part * PART)
        assert v.ports[0].wait(0, 4, 1, 10) == DONE
        expected = reduce([[v.input(rank).ravel() for rank in range(3)]], average=True)
        assert v.output(1).ravel().tobytes() == expected.tobytes()
    finally:
        v.close()


def test_results_of_two_rounds_lie_side_by_side(engine_node):
    v = engine_node(n_ranks=1)
    v.own(0)
    v.commit()
    for round in (1, 2, 3):
        v.input(0)[0] = round
        v.ports[0].submit(0, 1, round, 0, 0)
        assert v.ports[0].wait(0, 1, round, 10) == DONE
        assert (v.output(round)[0] == round).all()
        if round > 1:
            assert (v.output(round - 1)[0] == round - 1).all()


def test_an_input_may_lie_anywhere_in_the_segment(engine_node):
    v = engine_node(n_ranks=1)
    v.own(1)
    v.commit()
    v.input(0)[3] = 9
    v.ports[0].submit(1, 1, 1, 0, 3 * PART)
    assert v.ports[0].wait(1, 1, 1, 10) == DONE
    assert (v.output(1)[1] == 9).all()


def test_empty_contributions_leave_the_others(engine_node):
    v = engine_node(n_ranks=3)
    v.own(0)
    v.commit()
    v.input(1)[0] = -0.0
    for rank in range(3):
        v.ports[rank].submit(0, 1, 1, 0, 0, empty=rank != 1)
    assert v.ports[0].wait(0, 1, 1, 10) == DONE
    assert np.signbit(v.output(1)[0]).all()


def sums_of(v):
    """Return the records of all sums so far, as they began."""
    record = {"begin": "u8", "end": "u8", "part": "u4", "round": "u4", "kind": "u2", "thread": "u2", "nbytes": "u4"}
    records = np.frombuffer(v.engine.trace(), np.dtype(list(record.items())))
    return np.sort(records[records["kind"] == 3], order="begin")


def summed(v):
    """Return (part, round) of all sums so far, as they began."""
    sums = sums_of(v)
    return [(int(part), int(round_)) for part, round_ in zip(sums["part"], sums["round"])]


def test_ready_parts_leave_in_policy_order(engine_node):
    """All parts are ready before the commit; afterwards one thread takes them by integer rank."""
    order = [5, 0, 7, 2, 6, 1, 4, 3]
    v = engine_node(n_ranks=1, n_parts=8, n_threads=1, trace_capacity=100)
    for part in range(8):
        v.own(part)
    v.engine.freeze(5)
    for part in range(8):
        v.ports[0].submit(part, 1, 1, 0, part * PART)
    v.engine.commit(1, order)
    assert v.ports[0].wait(0, 8, 1, 10) == DONE
    assert [part for part, _ in summed(v)] == [order.index(rank) for rank in range(8)]


def test_without_urgency_parts_leave_as_they_were_complete(engine_node):
    v = engine_node(n_ranks=1, n_parts=4, n_threads=1, trace_capacity=100, fifo=True)
    for part in range(4):
        v.own(part)
    v.commit()
    v.ports[0].submit(3, 1, 1, 0, 3 * PART)
    assert v.ports[0].wait(3, 1, 1, 10) == DONE
    v.engine.freeze(5)
    for part in (2, 0, 1):
        v.ports[0].submit(part, 1, 1, 0, part * PART)
    v.engine.commit(2, [0, 1, 2, 3])
    assert v.ports[0].wait(0, 3, 1, 10) == DONE
    assert [part for part, _ in summed(v)] == [3, 2, 0, 1]


def test_the_trace_keeps_the_rounds_that_are_asked_for(engine_node):
    v = engine_node(n_ranks=1, n_parts=1, n_threads=1, trace_capacity=100, trace_first_round=2, trace_last_round=3)
    v.own(0)
    v.commit()
    for round_ in range(1, 6):
        v.ports[0].submit(0, 1, round_, 0, 0)
        assert v.ports[0].wait(0, 1, round_, 10) == DONE
    assert summed(v) == [(0, 2), (0, 3)]


def test_the_next_step_does_not_overtake_what_is_ready_of_this_one(engine_node):
    v = engine_node(n_ranks=1, n_parts=3, n_threads=1, trace_capacity=100)
    for part in range(3):
        v.own(part)
    v.commit()
    v.ports[0].submit(0, 1, 1, 0, 0)
    assert v.ports[0].wait(0, 1, 1, 10) == DONE
    v.engine.freeze(5)
    for part, round_ in ((2, 1), (1, 1), (0, 2)):
        v.ports[0].submit(part, 1, round_, 0, part * PART)
    v.engine.commit(2, [0, 1, 2])
    assert v.ports[0].wait(0, 1, 2, 10) == DONE
    assert summed(v) == [(0, 1), (1, 1), (2, 1), (0, 2)]


def test_a_frozen_engine_starts_nothing_and_commit_goes_on(engine_node):
    v = engine_node(n_ranks=1)
    v.own(0)
    v.commit()
    v.engine.freeze(5)
    v.ports[0].submit(0, 1, 1, 0, 0)
    assert v.ports[0].wait(0, 1, 1, 0.05) == TIMED_OUT
    v.own(1)
    v.engine.commit(2, [0, 1, 2, 3])
    assert v.ports[0].wait(0, 1, 1, 10) == DONE
    assert v.engine.generation == 2
    assert v.engine.report() == [(0, 1, 1), (1, 0, 1)]


def test_arrivals_of_the_next_generation_wait_for_the_commit(engine_node):
    v = engine_node(n_ranks=1)
    peer = v.engine.add_wire_peer()
    slots = Segment(PART)
    np.frombuffer(slots, np.float32)[:] = 5
    v.own(0, local=[], before=[(peer, slots.address)])
    v.engine.arrived(peer, 0, 1, 0)
    assert not v.ports[0].done(0, 1, 1)
    v.commit()
    assert v.ports[0].wait(0, 1, 1, 10) == DONE
    assert (v.output(1)[0] == 5).all()


@pytest.mark.parametrize(("n", "order", "text"), [(2, [0], r"commit\(2\)"), (1, [], "0 ranks for 1 parts")])
def test_a_wrong_commit_is_refused_and_changes_nothing(engine_node, n, order, text):
    v = engine_node(n_ranks=1)
    v.own(0)
    v.engine.freeze(5)
    with pytest.raises(ValueError, match=text):
        v.engine.commit(n, order)
    v.engine.commit(1, [0])
    with pytest.raises(ValueError, match="frozen: False"):
        v.engine.commit(2, [0])


def test_a_removed_part_can_be_added_again(engine_node):
    v = engine_node(n_ranks=1)
    v.own(0)
    with pytest.raises(ValueError, match="there already"):
        v.own(0)
    v.engine.remove(0)
    v.own(0)
    v.commit()
    v.engine.remove(0)  # committed: stays
    assert v.engine.report() == [(0, 0, 1)]


def test_a_commit_needs_no_ranks_for_removed_parts(engine_node):
    v = engine_node(n_ranks=1)
    v.own(0)
    v.commit([0])
    for part in (1, 2):
        v.own(part)
    for part in (1, 2):
        v.engine.remove(part)
    v.commit([0])  # a generation without partitions follows one that was refused
    assert v.engine.report() == [(0, 0, 1)]


def test_a_member_forwards_its_partial_and_publishes_the_result(engine_node):
    v = engine_node(n_ranks=2)
    owner = v.engine.add_wire_peer()
    partial = Segment(PART)
    v.engine.add_member(0, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernels.address("float32"),
                        local=v.ranks, owner=owner, partial=(partial.address, 3, 0))
    v.commit()
    for rank in range(2):
        v.input(rank)[0] = rank + 1
        v.ports[rank].submit(0, 1, 1, 0, 0)
    events = v.engine.events(10)
    assert events == [(native.EVENT_FORWARD, owner, 0, 1, 0, partial.address, PART)]
    assert (np.frombuffer(partial, np.float32) == 3).all()
    assert v.engine.missing(0) == (1, [owner], False)
    v.engine.arrived(owner, 0, 1, 0)
    assert v.ports[0].wait(0, 1, 1, 10) == DONE


def test_a_single_rank_is_forwarded_without_a_sum(engine_node):
    v = engine_node(n_ranks=1)
    owner = v.engine.add_wire_peer()
    v.engine.add_member(0, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernels.address("float32"),
                        local=v.ranks, owner=owner, partial=(v.outputs.address, 3, 0))
    v.commit()
    v.ports[0].submit(0, 1, 1, 0, 2 * PART)
    assert v.engine.events(10) == [(native.EVENT_FORWARD, owner, 0, 1, 0, v.inputs[0].address + 2 * PART, PART)]
    assert v.engine.counters()["sums"] == 0


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_lone_input_in_an_unmapped_segment_waits_to_be_forwarded(engine_node, n_ranks):
    v = engine_node(n_ranks=n_ranks)
    owner = v.engine.add_wire_peer()
    v.engine.add_member(0, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernels.address("float32"),
                        local=v.ranks, owner=owner, partial=(0, 0, 0))
    v.commit()
    for rank in range(n_ranks):
        v.ports[rank].submit(0, 1, 1, 1, 0, empty=rank != 0)
    assert v.engine.events(0.05) == []
    v.engine.map_segment(v.ranks[0], 7, v.inputs[0].address, PART)
    assert v.engine.events(0.05) == []
    v.engine.map_segment(v.ranks[0], 1, v.inputs[0].address, PART)
    assert v.engine.events(10) == [(native.EVENT_FORWARD, owner, 0, 1, 0, v.inputs[0].address, PART)]


def test_a_member_whose_ranks_are_all_empty_forwards_nothing(engine_node):
    v = engine_node(n_ranks=2)
    owner = v.engine.add_wire_peer()
    v.engine.add_member(0, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernels.address("float32"),
                        local=v.ranks, owner=owner, partial=(v.outputs.address, 3, 0))
    v.commit()
    for port in v.ports:
        port.submit(0, 1, 1, 0, 0, empty=True)
    assert v.engine.events(10) == [(native.EVENT_FORWARD, owner, 0, 1, native.FLAG_EMPTY, 0, 0)]


@pytest.mark.parametrize(("n_parts", "nbytes", "thread"), [(1, PART, 1), (2, PART, 1), (1, 256 << 10, 0)])
def test_who_receives_the_last_small_input_sums_it(engine_node, n_parts, nbytes, thread):
    v = engine_node(n_ranks=1, n_parts=1, n_threads=1, trace_capacity=100)
    memory, peer = Segment(4 * nbytes), v.engine.add_wire_peer()
    v.engine.map_segment(v.ranks[0], 1, memory.address, nbytes)
    for part in range(n_parts):
        v.own(part, nbytes=nbytes, n_elements=nbytes // 4, unit_offset=0, after=[(peer, memory.address + nbytes)],
              outputs=[memory.address + 2 * nbytes] * 2)
    v.commit(list(range(n_parts)))
    values = np.frombuffer(memory, np.float32).reshape(4, -1)
    values[0], values[1] = 1, 2
    for part in range(n_parts):
        v.ports[0].submit(part, 1, 1, 1, 0)
        while v.engine.missing(part)[1] != [peer]:
            pass
        v.engine.arrived(peer, part, 1, 0)
        assert v.ports[0].wait(part, 1, 1, 10) == DONE and (values[2] == 3).all()
    assert list(sums_of(v)["thread"]) == [thread] * n_parts


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_owner_takes_its_place_in_node_order(engine_node, place):
    """1e8 + 1 - 1e8 tells the orders apart in float32."""
    v = engine_node(n_ranks=1)
    terms = [1e8, -1e8, 1.0]
    slots = Segment(2 * PART)
    others = [term for i, term in enumerate(terms) if i != place]
    peers = [v.engine.add_wire_peer() for _ in others]
    for i, term in enumerate(others):
        np.frombuffer(slots, np.float32).reshape(2, N)[i] = term
    bound = [(peer, slots.address + i * PART) for i, peer in enumerate(peers)]
    v.own(0, before=bound[:place], after=bound[place:], to_wire=True)
    v.commit()
    v.input(0)[0] = terms[place]
    v.ports[0].submit(0, 1, 1, 0, 0)
    for peer in reversed(peers):
        v.engine.arrived(peer, 0, 1, 0)
    assert v.ports[0].wait(0, 1, 1, 10) == DONE
    assert (v.output(1)[0] == np.float32(np.float32(np.float32(1e8) + np.float32(-1e8)) + np.float32(1))).all()
    assert v.engine.events(10)[0][:4] == (native.EVENT_RESULT, 0, 0, 1)


def test_two_engines_on_one_host_move_no_byte(engine_node):
    """Member and owner share segments: the partial is summed where it lies, the result read where it appears."""
    member, owner = engine_node(n_ranks=2), engine_node(n_ranks=1)
    there, back = Segment(ring.PEER_LANE_NBYTES, populate=False), Segment(ring.PEER_LANE_NBYTES, populate=False)
    ring.format_lane(there)
    ring.format_lane(back)
    to_owner = member.engine.add_shm_peer(back, there, owner.bell)
    to_member = owner.engine.add_shm_peer(there, back, member.bell)
    partial = Segment(PART)
    member.engine.add_member(0, nbytes=PART, n_elements=N, unit_offset=0, kernel=kernels.address("float32"),
                             local=member.ranks, owner=to_owner, partial=(partial.address, 9, 0))
    owner.own(0, before=[(to_member, 0)], shm_peers=[to_member], divisor=3)
    member.commit()
    owner.commit()
    for rank in range(2):
        member.input(rank)[0] = rank + 1
        member.ports[rank].submit(0, 1, 1, 0, 0)
    owner.input(0)[0] = 3
    owner.ports[0].submit(0, 1, 1, 0, 0)
    assert owner.ports[0].wait(0, 1, 1, 0.1) == TIMED_OUT  # the member's segment 9 is not mapped yet
    owner.engine.map_segment(to_member, 9, partial.address, partial.nbytes)
    assert owner.ports[0].wait(0, 1, 1, 10) == DONE
    assert member.ports[1].wait(0, 1, 1, 10) == DONE
    assert (owner.output(1)[0] == 2).all()


@pytest.mark.parametrize("entry", [
    (0, 1, 2, 0, 0, 0), (3, 1, 1, 0, 0, 0), (70000, 1, 1, 0, 0, 0), (0, 70000, 1, 0, 0, 0),
], ids=["round ahead", "no such part", "part out of range", "count out of range"])
def test_a_broken_announcement_becomes_an_event(engine_node, entry):
    v = engine_node(n_ranks=1)
    v.own(0)
    v.commit()
    ring.Lane(v.lanes[0]).push(*entry)
    ring.Doorbell(v.bell).ring()
    [(kind, source, _, _, code, _, _)] = v.engine.events(10)
    assert (kind, source, code) == (native.EVENT_LOST, v.ranks[0], errno.EPROTO)


def test_whoever_reports_never_waits_for_the_reader_of_events(engine_node):
    v = engine_node(n_ranks=1)
    for _ in range(2000):  # enough objects that reading them runs the garbage collector
        v.engine.arrived(v.ranks[0], 9, 1, 0)
    stuck = []

    def beside_a_collection(phase, info):
        thread = threading.Thread(target=v.engine.arrived, args=(v.ranks[0], 9, 1, 0))
        thread.start()
        thread.join(2)
        stuck.append(thread.is_alive())

    gc.collect()
    gc.callbacks.append(beside_a_collection)
    try:
        events = v.engine.events(10)
    finally:
        gc.callbacks.remove(beside_a_collection)
    assert stuck and not any(stuck)
    assert len(events) == 2000 and len(v.engine.events(0)) == len(stuck)


def test_a_wake_up_between_two_calls_is_not_lost(engine_node):
    v = engine_node()
    assert v.engine.events(0) == []
    v.engine.wake()
    v.engine.wake()
    begin = time.monotonic()
    assert v.engine.events(20) == [] and time.monotonic() - begin < 10, "it returns at once"
    begin = time.monotonic()
    assert v.engine.events(0.2) == [] and time.monotonic() - begin >= 0.2, "and both count as one"


def test_a_wake_up_ends_a_call_that_waits(engine_node):
    v = engine_node()
    timer = threading.Timer(0.1, v.engine.wake)
    timer.start()
    begin = time.monotonic()
    assert v.engine.events(20) == [] and time.monotonic() - begin < 10
    timer.join(10)


def test_an_input_beyond_its_segment_is_never_read(engine_node):
    v = engine_node(n_ranks=1)
    v.own(0)
    v.commit()
    v.ports[0].submit(0, 1, 1, 0, 1 << 40)
    assert v.engine.events(10)[0][0] == native.EVENT_LOST
    assert not v.ports[0].done(0, 1, 1)


def test_late_duplicates_are_dropped_and_counted(engine_node):
    v = engine_node(n_ranks=1)
    v.own(0)
    v.commit()
    v.ports[0].submit(0, 1, 1, 0, 0)
    assert v.ports[0].wait(0, 1, 1, 10) == DONE
    v.ports[0].submit(0, 1, 1, 0, 0)
    v.ports[0].submit(0, 1, 2, 0, 0)
    assert v.ports[0].wait(0, 1, 2, 10) == DONE
    assert v.engine.counters()["stale"] == 1


def test_steady_rounds_allocate_nothing(engine_node):
    v = engine_node(n_ranks=1)
    v.own(0, to_wire=True)
    v.commit()
    before = v.engine.counters()["allocations"]
    for round in range(1, 5000):
        v.ports[0].submit(0, 1, round, 0, 0)
        assert v.ports[0].wait(0, 1, round, 10) == DONE
        v.engine.events(0)
    assert v.engine.counters()["allocations"] == before


def test_a_refused_order_leaves_the_engine_as_it_was(engine_node):
    v = engine_node(n_parts=2)
    for part in range(2):
        v.own(part)
    v.engine.freeze(5)
    for order in ([0, -1], [0, "x"], [0]):
        with pytest.raises((ValueError, OverflowError, TypeError)):
            v.engine.commit(1, order)
    v.engine.commit(1, [1, 0])
    assert v.engine.generation == 1
