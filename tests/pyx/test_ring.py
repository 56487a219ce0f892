"""Lanes and doorbells: order, fullness, no lost wake-up, nothing trusted from the other side."""
import threading

import pytest
from hypothesis import given, strategies as st

from bpsfast.pyx import ring
from bpsfast.pyx.pages import Segment


@given(capacity=st.integers(0, 5), steps=st.lists(st.booleans(), max_size=200))
def test_a_lane_is_a_bounded_queue(capacity, steps):
    memory = bytearray(256 + 32 * 2**capacity)
    ring.format_lane(memory)
    producer, consumer = ring.Lane(memory), ring.Lane(memory)
    assert producer.capacity == 2**capacity
    model, pushed = [], 0
    for push in steps:
        if push:
            entry = (pushed, 1, pushed + 1, pushed % 2, pushed % 7, pushed * 4096)
            assert producer.push(*entry) == (len(model) < 2**capacity)
            if len(model) < 2**capacity:
                model.append(entry)
            pushed += 1
        else:
            assert consumer.pop() == (model.pop(0) if model else None)


def test_indexes_wrap_around():
    memory = bytearray(256 + 32 * 4)
    ring.format_lane(memory)
    for at in (64, 128):
        memory[at : at + 4] = (2**32 - 2).to_bytes(4, "little")
    lane = ring.Lane(memory)
    for i in range(4):
        assert lane.push(i, 1, 1, 0, 0, 0)
    assert not lane.push(9, 1, 1, 0, 0, 0)
    assert [lane.pop()[0] for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("memory", [bytearray(64), bytearray(512), bytearray(b"\xff" * 512)])
def test_an_unformatted_lane_is_refused(memory):
    with pytest.raises(ValueError):
        ring.Lane(memory)


def test_a_capacity_beyond_the_buffer_is_refused():
    memory = bytearray(256 + 32 * 4)
    ring.format_lane(memory)
    memory[4:8] = (1 << 20).to_bytes(4, "little")
    with pytest.raises(ValueError, match="no formatted lane"):
        ring.Lane(memory)


def test_entries_cross_between_threads_in_order():
    with Segment(ring.LANE_NBYTES) as lane_memory, Segment(ring.DOORBELL_NBYTES) as bell_memory:
        ring.format_lane(lane_memory)
        ring.format_doorbell(bell_memory)
        n, got = 20000, []

        def consume():
            lane, bell = ring.Lane(lane_memory), ring.Doorbell(bell_memory)
            while len(got) < n:
                seen = bell.rings()
                entry = lane.pop()
                if entry is None:
                    bell.wait(seen, 10)
                else:
                    got.append(entry[0])

        consumer = threading.Thread(target=consume)
        consumer.start()
        lane, bell = ring.Lane(lane_memory), ring.Doorbell(bell_memory)
        for i in range(n):
            while not lane.push(i, 1, 1, 0, 0, 0):
                bell.ring()
            bell.ring()
        consumer.join(60)
        assert got == list(range(n))
        del lane, bell


def test_a_ring_before_the_wait_is_not_lost():
    memory = bytearray(ring.DOORBELL_NBYTES)
    ring.format_doorbell(memory)
    bell = ring.Doorbell(memory)
    seen = bell.rings()
    bell.ring()
    assert bell.wait(seen, 60)
    assert not bell.wait(bell.rings(), 0.01)


def test_a_ring_wakes_every_sleeper():
    memory = bytearray(ring.DOORBELL_NBYTES)
    ring.format_doorbell(memory)
    bell = ring.Doorbell(memory)
    seen = bell.rings()
    woken = []
    sleepers = [threading.Thread(target=lambda: woken.append(ring.Doorbell(memory).wait(seen, 60))) for _ in range(5)]
    for sleeper in sleepers:
        sleeper.start()
    bell.ring()
    for sleeper in sleepers:
        sleeper.join(60)
    assert woken == [True] * 5
