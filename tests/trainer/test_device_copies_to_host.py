"""Departures: in which order partitions take off, and what holds them up."""
from __future__ import annotations

import threading

import numpy as np
import pytest

from bpsfast.gpu import copies
from bpsfast.gpu.copies import CopyToDevice, CopyToHost, DeviceRange, ToHostCopier, partition_copies
from bpsfast.gpu.host import HostDevice
from bpsfast.orchestration.errors import ClosedError, DeviceError
from tests.support.device_memory import LIMIT_S, Memory, SlowDevice, copier_of, deadline, eventually, held

pytestmark = pytest.mark.usefixtures("no_leaks")
STRIDE = 1000


class Log:
    """What was announced: (title, number) in order."""

    def __init__(self):
        self.announced = []

    def copy(self, title, memory, priority=0, after=(), readers=(), announce=None):
        def note(piece, begin_ns):
            assert begin_ns > 0
            self.announced.append((title, piece.number))

        return CopyToHost(title, priority, memory.host.ctypes.data, memory.pieces(STRIDE), after, announce or note,
                         memory, readers)


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def device():
    return HostDevice()


@pytest.fixture
def copier(device):
    yield from copier_of(ToHostCopier(device, "to host"))


def done(*under_way):
    for copy in under_way:
        copy.wait(deadline(), lambda: None)


def test_partitions_are_announced_in_order_and_whole(device, copier, log):
    memory = Memory(device, 10 * STRIDE + 7)

    def announce(piece, begin_ns):
        begin = piece.number * STRIDE
        assert (memory.host[begin : begin + piece.nbytes] == memory.on_device[begin : begin + piece.nbytes]).all()
        log.announced.append(piece.number)

    copy = log.copy("a", memory, announce=announce)
    copier.add(copy)
    done(copy)
    assert log.announced == list(range(11))
    assert (memory.host == memory.on_device).all()
    assert copy.keeps is None


def test_what_is_not_covered_stays(device, copier):
    memory, announced = Memory(device, 3000), []
    pieces = partition_copies(3000, STRIDE, [DeviceRange(2100, memory.on_device.ctypes.data + 2100, 500)])
    copy = CopyToHost("a", 0, memory.host.ctypes.data, pieces, [], lambda piece, _: announced.append(piece.number),
                          memory)
    copier.add(copy)
    done(copy)
    assert announced == [0, 1, 2]
    assert np.flatnonzero(memory.host).tolist() == list(range(2100, 2600))


def test_the_most_urgent_that_is_ready_takes_off_first(device, copier, log):
    with held(device) as gate:
        after = [gate.stream.record()]
        waiting = [log.copy(name, Memory(device, 3 * STRIDE), priority, after)
                   for name, priority in (("late", 5), ("urgent", 9), ("later", 1), ("as late", 5))]
        with copier._condition:  # all are there when the copier looks
            for copy in waiting:
                copier.add(copy)
        gate.go()
        done(*waiting)
    assert log.announced == [(name, i) for name in ("urgent", "late", "as late", "later") for i in range(3)]


def test_a_stream_that_stands_still_holds_up_nothing_else(device, copier, log):
    with held(device) as gate:
        blocked = log.copy("blocked", Memory(device, STRIDE), priority=9, after=[gate.stream.record()])
        copier.add(blocked)
        others = [log.copy(str(i), Memory(device, 5 * STRIDE), after=[device.location().ready]) for i in range(3)]
        for copy in others:
            copier.add(copy)
        done(*others)
        assert not blocked.is_over
        gate.go()
        done(blocked)
    assert log.announced[-1] == ("blocked", 0)


def test_all_events_count(device, copier, log):
    with held(device) as first, held(device) as second:
        copy = log.copy("a", Memory(device, STRIDE), after=[first.stream.record(), second.stream.record()])
        copier.add(copy)
        first.go()
        copier.add(other := log.copy("b", Memory(device, STRIDE)))
        done(other)
        assert not copy.is_over
        second.go()
        done(copy)


def test_later_events_of_a_stream_are_not_asked():
    class Counted:
        origin, asked = "s", 0

        def done(self):
            self.asked += 1
            return False

    events = [Counted() for _ in range(5)]
    under_way = [CopyToHost("a", 0, 0, partition_copies(1, 1, []), [event], lambda *_: None, None) for event in events]
    assert copies._ready(under_way) == []
    assert [event.asked for event in events] == [1, 0, 0, 0, 0]


def test_results_that_are_still_read_hold_it_up(device, copier, log):
    reader = CopyToDevice("r", 0, [], [], lambda offset: 0, lambda *_: False, lambda *_: None, None)
    copy = log.copy("a", Memory(device, STRIDE), readers=[reader])
    copier.add(copy)
    copier.add(other := log.copy("b", Memory(device, STRIDE)))
    done(other)
    assert not copy.is_over
    reader.release_memory()
    done(copy)


def test_a_window_is_in_the_air(monkeypatch, log):
    monkeypatch.setattr(copies, "_WINDOW_NBYTES", 4 * STRIDE)
    device = SlowDevice()
    copiers = copier_of(ToHostCopier(device, "to host"))
    copier = next(copiers)
    memory, urgent = Memory(device, 20 * STRIDE), Memory(device, 2 * STRIDE)
    copier.add(copy := log.copy("a", memory))
    eventually(lambda: device.streams and len(device.streams[0].order) == 4)
    stream = device.streams[0]
    copier.add(early := log.copy("urgent", urgent, priority=1))
    stream.go(1)
    eventually(lambda: len(stream.order) == 5)
    assert stream.order[4] == urgent.on_device.ctypes.data, "the next that takes off"
    assert log.announced == [("a", 0)]
    stream.go(100)
    done(copy, early)
    for _ in copiers:
        pass


def test_small_ones_fly_two_at_a_time_at_least(monkeypatch, log):
    monkeypatch.setattr(copies, "_WINDOW_NBYTES", 1)
    device = SlowDevice()
    copiers = copier_of(ToHostCopier(device, "to host"))
    copier = next(copiers)
    copier.add(copy := log.copy("a", Memory(device, 5 * STRIDE)))
    eventually(lambda: device.streams and len(device.streams[0].order) == 2)
    device.streams[0].go(5)
    done(copy)
    for _ in copiers:
        pass


@pytest.mark.parametrize("where", ["the owner's stream", "the copy", "the announcement"])
def test_a_failure_ends_all(device, copier, log, where):
    memory = Memory(device, STRIDE)
    owner = device.stream()

    def fail(*_):
        raise ValueError("it went wrong")

    with held(device) as gate:
        copier.add(other := log.copy("other", Memory(device, STRIDE), after=[gate.stream.record()]))
        if where == "the owner's stream":
            owner.run(fail)
            bad = log.copy("bad", memory, after=[owner.record()])
        elif where == "the copy":
            device.unpin(memory.host.ctypes.data)
            bad = log.copy("bad", memory)
        else:
            bad = log.copy("bad", memory, announce=fail)
        copier.add(bad)
        for copy in bad, other:
            with pytest.raises(DeviceError, match="not pinned" if where == "the copy" else "it went wrong"):
                done(copy)
        assert log.announced == []
    owner.close()


def test_closing_does_not_wait_for_the_owners_stream(device, log):
    copiers = copier_of(ToHostCopier(device, "to host"))
    copier = next(copiers)
    with held(device) as gate:
        copier.add(copy := log.copy("a", Memory(device, STRIDE), after=[gate.stream.record()]))
        copier.close(lambda: ClosedError("closed"))
        assert copier.join(LIMIT_S / 2), "nothing was enqueued that waits for the stream"
        with pytest.raises(ClosedError):
            done(copy)
        assert copy.keeps is None


def test_many_small_ones(device, copier, log):
    """Thousands of partitions and of units in a second, not in the square of it."""
    many = Memory(device, 4000 * 8)
    big = CopyToHost("big", 0, many.host.ctypes.data, many.pieces(8), [], lambda *_: log.announced.append(0), many)
    small = [log.copy(str(i), Memory(device, 8)) for i in range(1000)]
    copier.add(big)
    for copy in small:
        copier.add(copy)
    done(big, *small)
    assert len(log.announced) == 5000


def test_any_thread_may_add(device, copier, log):
    under_way = [log.copy(str(i), Memory(device, STRIDE)) for i in range(8)]
    threads = [threading.Thread(target=copier.add, args=(copy,)) for copy in under_way]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done(*under_way)
    assert len(log.announced) == 8


def test_what_a_card_takes_from_the_device_is_copied_within_it(device, copier):
    """Pieces 1 and 3 go to memory of the device that was not pinned, which `copy` would refuse."""
    memory, straight, announced = Memory(device, 4 * STRIDE), np.zeros(2 * STRIDE, np.uint8), []
    begin = straight.ctypes.data
    copier.add(copy := CopyToHost("a", 0, memory.host.ctypes.data, memory.pieces(STRIDE), [],
                                    lambda piece, _: announced.append(piece.number), memory,
                                    on_device={1: begin - STRIDE, 3: begin + STRIDE - 3 * STRIDE}))
    done(copy)
    parts = memory.on_device.reshape(4, STRIDE)
    assert (straight.reshape(2, STRIDE) == parts[[1, 3]]).all() and (memory.host.reshape(4, STRIDE)[[0, 2]]
                                                                     == parts[[0, 2]]).all()
    assert not memory.host.reshape(4, STRIDE)[[1, 3]].any() and announced == [0, 1, 2, 3]
