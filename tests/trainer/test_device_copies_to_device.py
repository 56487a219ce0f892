"""Arrivals: partitions go back as they are complete, in whatever order that is."""
from __future__ import annotations

import threading

import numpy as np
import pytest

from bpsfast.gpu.copies import CopyToDevice, DeviceRange, ToDeviceCopier, partition_copies
from bpsfast.gpu.host import HostDevice
from bpsfast.orchestration.errors import ClosedError, DeviceError, PeerLostError
from tests.support.device_memory import LIMIT_S, Memory, SlowDevice, copier_of, deadline, eventually, held

pytestmark = pytest.mark.usefixtures("no_leaks")
STRIDE = 1000


class Sum:
    """A sum whose partitions are complete when a test says so; what has landed on the device is in `landed`."""

    def __init__(self, device, n_parts, priority=0, after=()):
        self.memory = memory = Memory(device, n_parts * STRIDE)
        memory.host[:], memory.on_device[:] = memory.on_device, 0
        self.landed = []
        self.looked = set()
        self._complete = set()
        self._changed = threading.Condition()
        self.copy = CopyToDevice("a", priority, memory.pieces(STRIDE), after,
                               lambda offset: memory.host.ctypes.data + offset, self._wait, self._land, memory)

    def complete(self, *numbers):
        with self._changed:
            self._complete.update(numbers)
            self._changed.notify_all()

    def fail(self, error):
        self.complete(error)

    def is_there(self, number):
        part = slice(number * STRIDE, (number + 1) * STRIDE)
        return (self.memory.on_device[part] == self.memory.host[part]).all()

    def _wait(self, number, timeout_s):
        with self._changed:
            self.looked.add(number)
            self._changed.wait_for(lambda: number in self._complete, timeout_s)
            for each in self._complete:
                if isinstance(each, Exception):
                    raise each
            return number in self._complete

    def _land(self, piece, begin_ns):
        assert begin_ns > 0
        assert self.is_there(piece.number)
        self.landed.append(piece.number)


@pytest.fixture
def device():
    return HostDevice()


@pytest.fixture
def copier(device):
    yield from copier_of(ToDeviceCopier(device, "to device"))


def over(copy):
    copy.wait(deadline(), lambda: None)


def test_partitions_come_as_they_are_complete(device, copier):
    sum = Sum(device, 4)
    copier.add(sum.copy)
    for number in 2, 0, 3:
        sum.complete(number)
        eventually(lambda number=number: number in sum.landed)
        assert not sum.copy.is_over
        assert sum.copy.event is None
        assert sum.copy.keeps is not None
        assert not sum.copy.is_finished
    sum.complete(1)
    over(sum.copy)
    assert sum.copy.event.wait(LIMIT_S)
    assert (sum.memory.on_device == sum.memory.host).all()
    assert sum.copy.wait_finished(LIMIT_S)
    assert sum.copy.keeps is None
    assert sum.landed == [2, 0, 3, 1]


def test_it_is_over_before_its_copies_are_done():
    device = SlowDevice()
    copiers = copier_of(ToDeviceCopier(device, "to device"))
    copier = next(copiers)
    sum = Sum(device, 3)
    sum.complete(0, 1, 2)
    copier.add(sum.copy)
    over(sum.copy)
    assert not sum.copy.event.done()
    assert not sum.copy.is_finished
    assert sum.copy.keeps is not None
    device.streams[0].go(3)
    assert sum.copy.event.wait(LIMIT_S)
    assert sum.copy.wait_finished(LIMIT_S)
    for _ in copiers:
        pass


def test_copies_are_enqueued_by_urgency():
    device = SlowDevice()
    copiers = copier_of(ToDeviceCopier(device, "to device"))
    copier = next(copiers)
    sums = [Sum(device, 2, priority) for priority in (-5, -1, -9)]
    for sum in sums:
        sum.complete(0, 1)
    with copier._condition:
        for sum in sums:
            copier.add(sum.copy)
    for sum in sums:
        over(sum.copy)
    first = [sums[i].memory.host.ctypes.data for i in (1, 0, 2)]
    assert device.streams[0].order == [address + offset for address in first for offset in (0, STRIDE)]
    device.streams[0].go(6)
    for _ in copiers:
        pass


def test_a_target_that_is_not_ready_holds_up_no_other(device, copier):
    with held(device) as gate:
        waiting = Sum(device, 2, after=[gate.stream.record()])
        waiting.complete(0, 1)
        copier.add(waiting.copy)
        over(waiting.copy)  # whoever waits enqueues his work after `event`, and goes on
        other = Sum(device, 2)
        copier.add(other.copy)
        other.complete(0, 1)
        assert other.copy.wait_finished(LIMIT_S)
        assert not waiting.copy.event.done()
        assert not waiting.is_there(0)
        gate.go()
        assert waiting.copy.wait_finished(LIMIT_S)
        assert waiting.is_there(1)


def test_nothing_to_copy_is_over_at_once(device, copier):
    copy = CopyToDevice("a", 0, partition_copies(STRIDE, STRIDE, []), [], lambda offset: 0, lambda *_: False,
                           lambda *_: None, None)
    copier.add(copy)
    over(copy)
    assert copy.event.wait(LIMIT_S)
    assert copy.wait_finished(LIMIT_S)


def test_what_a_target_does_not_cover_is_not_waited_for(device, copier):
    memory = Memory(device, 3 * STRIDE)
    asked = []

    def wait(number, timeout_s):
        asked.append(number)
        return True

    pieces = partition_copies(3 * STRIDE, STRIDE, [DeviceRange(STRIDE + 10, memory.on_device.ctypes.data, 20)])
    memory.host[:] = 7
    copy = CopyToDevice("a", 0, pieces, [], lambda offset: memory.host.ctypes.data + offset, wait,
                           lambda *_: None, None)
    copier.add(copy)
    over(copy)
    assert copy.event.wait(LIMIT_S)
    assert asked == [1]
    assert np.flatnonzero(memory.on_device[:30] == 7).tolist() == list(range(20))


def test_what_will_never_be_complete_ends_all(device, copier):
    sums = [Sum(device, 2), Sum(device, 2)]
    for sum in sums:
        copier.add(sum.copy)
    sums[0].complete(0)
    sums[0].fail(PeerLostError("rank 1 is lost"))
    for sum in sums:
        with pytest.raises(PeerLostError, match="rank 1"):
            over(sum.copy)
        assert sum.copy.wait_finished(LIMIT_S), "nothing reads it any more"
        assert sum.copy.keeps is None


def half_way(device, copier):
    """Return a sum of two pieces, the first of which is being copied."""
    sum = Sum(device, 2)
    sum.complete(0)
    copier.add(sum.copy)
    eventually(lambda: device.streams and len(device.streams[0].order) == 1)
    return sum


def test_what_somebody_else_has_ended_is_let_go_of_after_its_copies():
    device = SlowDevice()
    copiers = copier_of(ToDeviceCopier(device, "to device"))
    copier = next(copiers)
    sum = half_way(device, copier)
    sum.copy.end(DeviceError("its input was lost"))
    assert not sum.copy.wait_finished(0.02), "a copy reads the sum"
    assert sum.copy.keeps is not None
    device.streams[0].go(1)
    assert sum.copy.wait_finished(LIMIT_S), "the rest will never be complete"
    assert sum.is_there(0)
    with pytest.raises(DeviceError, match="was lost"):
        over(sum.copy)
    for _ in copiers:
        pass


def bad_kernel():
    raise ValueError("a bad kernel")


def test_a_target_whose_stream_has_failed(device, copier):
    owner = device.stream()
    owner.run(bad_kernel)
    ready = owner.record()
    with pytest.raises(DeviceError, match="a bad kernel"):
        ready.wait(LIMIT_S)
    sum = Sum(device, 1, after=[ready])
    sum.complete(0)
    copier.add(sum.copy)
    with pytest.raises(DeviceError, match="a bad kernel"):
        over(sum.copy)
    owner.close()


def test_a_target_whose_stream_fails_once_copies_wait_for_it(device, copier):
    """Whoever waits has gone on by then: it is told by the event that his work comes after."""
    with held(device) as gate:
        gate.stream.run(bad_kernel)
        sum = Sum(device, 1, after=[gate.stream.record()])
        sum.complete(0)
        copier.add(sum.copy)
        over(sum.copy)
        gate.go()
        with pytest.raises(DeviceError, match="a bad kernel"):
            sum.copy.event.wait(LIMIT_S)
        assert sum.copy.wait_finished(LIMIT_S)
        assert not sum.is_there(0)


def test_closing_waits_for_copies():
    device = SlowDevice()
    copiers = copier_of(ToDeviceCopier(device, "to device"))
    copier = next(copiers)
    sum = half_way(device, copier)
    copier.close(lambda: ClosedError("closed"))
    with pytest.raises(ClosedError):
        over(sum.copy)
    assert not copier.join(0.02), "a copy reads the sum"
    assert not sum.copy.is_finished
    assert sum.copy.keeps is not None
    device.streams[0].go(1)
    assert copier.join(LIMIT_S)
    assert sum.copy.is_finished
    assert sum.is_there(0)
    for _ in copiers:
        pass


def test_thousands_of_partitions(device, copier):
    """Looked at as many times, not in the square of it."""
    n_parts, n_looks = 4000, 0
    memory = Memory(device, 8 * n_parts)

    def wait(number, timeout_s):
        nonlocal n_looks
        n_looks += 1
        return number % 7 != 3 or n_looks > n_parts

    copy = CopyToDevice("a", 0, memory.pieces(8), [], lambda offset: memory.host.ctypes.data + offset, wait,
                      lambda *_: None, None)
    copier.add(copy)
    over(copy)
    assert n_looks < 10 * n_parts


class Noticing(HostDevice):
    """A device that has to be told to see what cards have written."""

    def __init__(self):
        super().__init__()
        self.noticed = []
        self.complete = set()

    def flush_remote_writes(self):
        self.noticed.append(set(self.complete))


def test_a_device_takes_notice_before_it_reads_what_cards_have_written():
    """Once they are complete, before each copy; never for what lies on the host."""
    device = Noticing()
    written = np.random.default_rng(1).integers(1, 256, 3 * STRIDE, np.uint8)  # on the device: not pinned
    target = np.zeros(3 * STRIDE, np.uint8)
    host = written[STRIDE : 2 * STRIDE].copy()
    device.pin(host.ctypes.data, STRIDE, True)
    changed = threading.Condition()

    def wait(number, timeout_s):
        with changed:
            return changed.wait_for(lambda: number in device.complete, timeout_s)

    def complete(number):
        with changed:
            device.complete.add(number)
            changed.notify_all()

    copy = CopyToDevice("a", 0, partition_copies(3 * STRIDE, STRIDE,
                                                    [DeviceRange(0, target.ctypes.data, 3 * STRIDE)]), [],
                      lambda offset: host.ctypes.data + offset - STRIDE if STRIDE <= offset < 2 * STRIDE
                      else written.ctypes.data + offset, wait, lambda *_: None, None, on_device={0, 2})
    for copier in copier_of(ToDeviceCopier(device, "noticing")):
        copier.add(copy)
        complete(1)
        eventually(lambda: (target[STRIDE : 2 * STRIDE] == host).all())
        assert device.noticed == []
        complete(0)
        eventually(lambda: (target[:STRIDE] == written[:STRIDE]).all())
        complete(2)
        copy.wait(deadline(), lambda: None)
        copy.event.wait()
    assert (target == written).all()
    assert device.noticed == [{0, 1}, {0, 1, 2}]
