"""Staging buffers: shared memory in the place of a device's, for as long as a call takes."""
from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.gpu.host import HostArray, HostDevice, HostStream, host_device
from bpsfast.orchestration.errors import ClosedError, DeviceError, StallError
from bpsfast.trainer import process
from bpsfast.trainer.gpu.staging_buffers import StagingBuffer
from bpsfast.trainer.tensor_input import tensor_input
from tests.support.device_memory import LIMIT_S, deadline, eventually, held


@pytest.fixture
def one(shared_job):
    return shared_job(ranks=(1,))


def staging_buffer_of(x):
    memory = tensor_input(x)
    return StagingBuffer(process.current().devices.staging_buffers, memory.location, memory.address, memory.nbytes,
                         memory.owner)


def on_device(value=0, n=5000, stream=None):
    x = np.full(n, value, "f4").view(HostArray)
    x.stream = stream
    return x


def there_and_back():
    x = on_device(3)
    staging_buffer = staging_buffer_of(x)
    staging_buffer.fetch()
    staging_buffer.wait(deadline())
    view = staging_buffer.region.array[: x.nbytes].view("f4")
    fetched = float(view.sum())
    view += 1
    x.fill(0)
    event = staging_buffer.restore()
    staging_buffer.release()
    event.wait(LIMIT_S)
    return fetched, float(x.sum())


def test_there_and_back(one):
    assert one.run(there_and_back) == [(15000.0, 20000.0)]


def written_after():
    """Nothing is written before what the owner has enqueued."""
    with held(host_device()) as gate:
        x = on_device(stream=gate.stream)
        gate.stream.run(lambda: x.fill(9))
        staging_buffer = staging_buffer_of(x)
        staging_buffer.region.array[: x.nbytes].view("f4")[:] = 1
        event = staging_buffer.restore()
        early = event.done(), float(x.sum())
        gate.go()
        event.wait(LIMIT_S)
        staging_buffer.release()
        return early, float(x.sum())


def test_a_staging_buffer_is_written_in_its_owners_order(one):
    assert one.run(written_after) == [((False, 0.0), 5000.0)]


def kept():
    """The memory on both sides is held until the device has done with it, and then somebody else's."""
    session = process.current()
    with held(host_device()) as gate:
        x = on_device(2, stream=gate.stream)
        staging_buffer = staging_buffer_of(x)
        staging_buffer.fetch()
        first = staging_buffer.region.offset
        staging_buffer.release()
        staging_buffer.release = None
        others = [staging_buffer_of(on_device()) for _ in range(2)]
        apart = first not in [each.region.offset for each in others]
        n_kept = len(session.devices.staging_buffers._returning)
        gate.go()
        gate.stream.record().wait(LIMIT_S)
        eventually(lambda: session.devices.staging_buffers.reap() or not session.devices.staging_buffers._returning)
        again = staging_buffer_of(on_device())
        for each in (*others, again):
            each.release()
        return apart, n_kept, again.region.offset == first


def test_memory_is_kept_until_copies_are_done(one):
    assert one.run(kept) == [(True, 1, True)]


def blocked():
    """Waiting has a deadline; a stream that stands still holds up copies of no other."""
    with held(host_device()) as gate:
        slow, quick = staging_buffer_of(on_device(1, stream=gate.stream)), staging_buffer_of(on_device(1))
        slow.fetch()
        quick.fetch()
        quick.wait(deadline())
        begun, text = time.monotonic(), ""
        try:
            slow.wait(begun + 0.1)
        except StallError as exc:
            text = str(exc)
        took_s = time.monotonic() - begun
        gate.go()
        slow.wait(deadline())
        slow.release()
        quick.release()
        return text, took_s < 5


def test_waiting_has_a_deadline(one):
    ((text, is_soon),) = one.run(blocked)
    assert "20000 bytes did not come from host in time: the stream" in text
    assert is_soon


def failed():
    stream = host_device().stream()

    def fail():
        raise ValueError("a bad kernel")

    stream.run(fail)
    staging_buffer = staging_buffer_of(on_device(stream=stream))
    staging_buffer.fetch()
    text = ""
    try:
        staging_buffer.wait(deadline())
    except DeviceError as exc:
        text = str(exc)
    staging_buffer.release()
    stream.close()
    process.current().devices.staging_buffers.reap()
    fine = staging_buffer_of(on_device(4))
    fine.fetch()
    fine.wait(deadline())
    is_right = float(fine.region.array[:20000].view("f4").sum()) == 20000.0
    fine.release()
    return text, is_right


def test_a_failure_is_its_own_streams(one):
    ((text, is_right),) = one.run(failed)
    assert "a bad kernel" in text
    assert is_right


def refused():
    """Memory that the device cannot reach is given back."""
    session = process.current()
    region = session.memory.allocate(5000)
    session.memory.release(region)
    device = HostDevice()
    device.name = "refusing:0"
    for segment in session.memory.segments.values():
        device.pin(segment.address, segment.nbytes, True)
    try:
        session.devices.staging_buffers.allocate(device.location(), 5000)
    except DeviceError:
        again = session.memory.allocate(5000)
        session.memory.release(again)
        return again.offset == region.offset


def test_what_cannot_be_pinned_is_given_back(one):
    assert one.run(refused) == [True]


class Broken(HostDevice):
    """A device that fails at every call once `is_broken`, as a GPU does after a kernel's fault."""

    def __init__(self):
        super().__init__()
        self.name = "broken:0"
        self.is_broken = False

    def stream(self):
        return BrokenStream(self)


class BrokenStream(HostStream):
    def __init__(self, device):
        super().__init__(device)
        self.device = device

    def record(self):
        if self.device.is_broken:
            raise DeviceError("broken:0 failed while recording an event")
        return super().record()


def broken():
    """Of a device that has failed nothing is under way: the session ends as ever."""
    session = process.current()
    device = Broken()
    before = threading.active_count()
    x = np.zeros(5000, "f4")
    staging_buffer = StagingBuffer(session.devices.staging_buffers, device.location(), x.ctypes.data, x.nbytes, x)
    staging_buffer.fetch()
    staging_buffer.wait(deadline())
    staging_buffer.release()
    device.is_broken = True
    bpsfast.shutdown()
    return threading.active_count() - before


def test_a_broken_device_keeps_nobody_from_leaving(job):
    (n_more,) = job(ranks=(1,)).run(broken)
    assert n_more <= 0


def closed():
    """The end does not come while copies go on; without them it leaves no thread."""
    session = process.current()
    staging_buffers = session.devices.staging_buffers
    before = threading.active_count()
    with held(host_device()) as gate:
        x = on_device(2, stream=gate.stream)
        staging_buffer = staging_buffer_of(x)
        staging_buffer.fetch()
        early = staging_buffers.close(time.monotonic() + 0.05)
        gate.go()
    bpsfast.shutdown()
    text = ""
    try:
        staging_buffer_of(on_device())
    except ClosedError as exc:
        text = str(exc)
    return early, bool(text), threading.active_count() - before


def test_closing(job):
    ((early, is_refused, n_more),) = job(ranks=(1,)).run(closed)
    assert not early
    assert is_refused
    assert n_more <= 0, "the second close has waited for the streams that were not over at the first"
