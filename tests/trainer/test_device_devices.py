"""The devices of a session: segments pinned once, copy threads made when they are needed, all of it over at the end."""
from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

import bpsfast
from bpsfast.gpu.host import HostArray, HostDevice, host_device
from bpsfast.orchestration.errors import BpsError, ClosedError, DeviceError
from bpsfast.trainer import process
from bpsfast.trainer.gpu.devices import DeviceBytes, Devices
from bpsfast.trainer.tensor_input import from_array, tensor_input
from tests.support.device_memory import LIMIT_S, deadline, eventually, held


@pytest.fixture
def two(shared_job):
    return shared_job(ranks=(2,), timeout_s=20)


def on_device(value=1.0, n=1000):
    return np.full(n, value, "f4").view(HostArray)


def pinned_once():
    """Segments are pinned at the first use by a kind of device, however many tensors lie there, and by which of it."""
    devices, pins = process.current().devices, host_device()._pinned
    before = len(pins)
    for name in "pqr":
        bpsfast.push_pull(on_device(), name=f"pinned {name}")
    devices.pin(host_device(), list(process.current().memory.segments.values()))
    once = len(host_device()._pinned)
    other = HostDevice()
    other.name = "host:1"
    devices.pin(other, list(process.current().memory.segments.values()))
    return before, once, len(process.current().memory.segments), other._pinned


def test_segments_are_pinned_once_for_a_kind(job):
    for before, once, n_segments, others in job(ranks=(2,)).run(pinned_once):
        assert before == 0
        assert once == n_segments >= 2
        assert others == []


def ended():
    """The end of a session ends its threads and unpins; a next one pins anew."""
    before = threading.active_count()
    sums = [float(bpsfast.push_pull(on_device(), average=False, name="ended")[0])]
    bpsfast.broadcast(on_device(), 0)
    during = threading.active_count()
    n_pinned = len(host_device()._pinned)
    bpsfast.shutdown()
    return before, during, threading.active_count(), n_pinned > 0, host_device()._pinned, sums


def test_the_end_leaves_nothing(job):
    for before, during, after, was_pinned, pinned, sums in job(ranks=(2,)).run(ended):
        assert during > before
        assert after <= before
        assert was_pinned
        assert pinned == []
        assert sums == [2.0]


def ended_midway():
    """A session is closed while its owner's stream stands still, and what waits for it is told so."""
    with held(host_device()) as gate:
        x = on_device()
        x.stream = gate.stream
        handle = bpsfast.push_pull_async(x, name="midway")
        told = []

        def wait():
            try:
                handle.wait()
            except BpsError as exc:
                told.append(type(exc))

        waiting = threading.Thread(target=wait)
        waiting.start()
        bpsfast.shutdown()
        waiting.join(LIMIT_S)
        pinned = list(host_device()._pinned)
        n_threads = sum(thread.name.startswith("bpsfast-from") for thread in threading.enumerate())
        try:
            bpsfast.push_pull(on_device(), name="midway")
        except ClosedError as exc:
            told.append(type(exc))
        return told, pinned, n_threads


def test_the_end_waits_for_no_stream(job):
    assert job(ranks=(1,)).run(ended_midway) == [([ClosedError, ClosedError], [], 0)]


def copies_at_the_end():
    """Copies that go on hold segments where they are, and their arrays."""
    session = process.current()
    bpsfast.declare("late", (1000,), average=False)
    unit = session.tensors.unit("late", LIMIT_S)
    with held(host_device()) as gate:
        late = on_device(0)
        late.stream = gate.stream
        sent = session.devices.send(unit, DeviceBytes.of(tensor_input(on_device())), DeviceBytes.of(tensor_input(late)))
        sent.wait(deadline())
        is_closed = session.devices.close(0.1, lambda: ClosedError("closed"))
        kept = len(host_device()._pinned)
        gate.go()
        eventually(lambda: late[-1])
        return is_closed, kept > 0, float(late.sum())


def test_segments_stay_while_copies_go_on(job):
    assert job(ranks=(1,)).run(copies_at_the_end) == [(False, True, 1000.0)]


class Heard(logging.Handler):
    """Collects warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def refused_pins():
    """Results that cannot be pinned are copied all the same, with one warning; inputs must be."""
    session, heard = process.current(), Heard()
    logging.getLogger("bpsfast.gpu").addHandler(heard)
    bpsfast.push_pull(np.ones(1000, "f4"), average=False, name="refused")
    bpsfast.empty(10)
    results = [segment for segment in session.memory.segments.values() if not segment.writable]
    for segment in results:
        host_device().pin(segment.address, segment.nbytes, False)  # so that it cannot be again
    sums = [float(bpsfast.push_pull(on_device(), average=False, name="refused", out=on_device())[0]) for _ in range(2)]
    fresh = Devices(session)
    inputs = [segment for segment in session.memory.segments.values() if segment.writable]
    try:
        fresh.pin(host_device(), inputs)
    except DeviceError as exc:
        return sums, heard.texts, str(exc)


def test_results_that_cannot_be_pinned(job):
    for sums, texts, refusal in job(ranks=(2,)).run(refused_pins):
        assert sums == [2.0, 2.0]
        assert len(texts) == 1
        assert "not pinned, which blocks and is slow" in texts[0]
        assert "pinned already" in refusal


def located():
    """The setting host_device: what is not shared memory lies on the host device."""
    devices = process.current().devices
    private, shared, already = np.ones(3, "f4"), bpsfast.empty(3), on_device(n=3)
    locations = [devices.located(tensor_input(x)).location for x in (private, shared, already)]
    return [location and location.device.name for location in locations], DeviceBytes.of(from_array(private)) is None


def test_the_setting_places_arrays(job, two):
    assert job(ranks=(1,), host_device=True).run(located) == [(["host", None, "host"], True)]
    assert two.run(located) == [([None, None, "host"], True)] * 2


def into_shared_memory():
    """With the setting, memory of `empty` stays what it is, whatever is on the other side."""
    shared = bpsfast.empty(1000)
    out = bpsfast.push_pull(np.full(1000, 2.0, "f4"), average=False, name="into shared", out=shared)
    back = bpsfast.push_pull(shared, average=False, name="out of shared", out=np.zeros(1000, "f4"))
    return out is shared, float(out[0]), float(back[0]), float(bpsfast.push_pull(shared, False, name="in it")[0])


def test_private_and_shared_memory_go_together(shared_job):
    assert shared_job(ranks=(2,), host_device=True).run(into_shared_memory) == [(True, 4.0, 8.0, 8.0)] * 2


def of_a_stream_in_shared_memory():
    """An array of a stream counts as it is there, where a plain one was pushed under the name before."""
    shared = bpsfast.empty(10)
    for _ in range(2):
        bpsfast.push_pull(shared, average=False, name="stream in shared")
    with held(host_device()) as gate:
        x = shared.view(HostArray)
        x.stream = gate.stream
        gate.stream.run(lambda: shared.fill(3))
        timer = threading.Timer(0.1, gate.go)
        timer.start()
        summed = bpsfast.push_pull(x, average=False, name="stream in shared")
        timer.join()
        gate.stream.record().wait(LIMIT_S)
        return float(summed[0])


def test_a_repeated_name_keeps_the_order_of_a_stream(two):
    assert two.run(of_a_stream_in_shared_memory) == [6.0] * 2
