"""The machine itself as a device keeps CUDA's rules: order, events, failures that stay, pins."""
from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest

from bpsfast.gpu.host import HostArray, HostDevice, host_device
from bpsfast.orchestration.errors import DeviceError

pytestmark = pytest.mark.usefixtures("no_leaks")
PAGE = mmap.PAGESIZE


@pytest.fixture
def device():
    return HostDevice()


@pytest.fixture
def stream(device):
    stream = device.stream()
    yield stream
    stream.close()


def address_of(array):
    return array.ctypes.data


def test_work_is_done_in_order(stream):
    done = []
    for i in range(100):
        stream.run(lambda i=i: done.append(i))
    assert stream.record().wait(10)
    assert done == list(range(100))


def test_an_event_is_reached_after_what_is_before_it(stream):
    go = threading.Event()
    stream.run(go.wait)
    event = stream.record()
    assert not event.done()
    assert not event.wait(0.0)
    go.set()
    assert event.wait(10)
    assert event.done()


def test_a_stream_waits_for_another_and_its_caller_does_not(device, stream):
    go, done = threading.Event(), []
    other = device.stream()
    other.run(go.wait)
    other.run(lambda: done.append("before"))
    stream.wait(other.record())
    stream.run(lambda: done.append("after"))
    assert not stream.record().wait(0.0)
    go.set()
    assert stream.record().wait(10)
    assert done == ["before", "after"]
    other.close()


def test_events_know_their_stream(device, stream):
    assert stream.record().origin == stream.record().origin
    assert stream.record().origin != device.location().ready.origin


def fail():
    raise ValueError("a bad kernel")


def test_a_failure_stays(stream):
    before = stream.record()
    stream.run(fail)
    done = []
    stream.run(lambda: done.append(1))
    for event in stream.record(), stream.record():
        with pytest.raises(DeviceError, match="a bad kernel"):
            event.wait(10)
        with pytest.raises(DeviceError, match="a bad kernel"):
            event.done()
    assert before.wait(10)
    assert done == []


def test_a_failure_reaches_streams_that_wait_for_it(device, stream):
    other = device.stream()
    other.run(fail)
    stream.wait(other.record())
    with pytest.raises(DeviceError, match="a bad kernel"):
        stream.record().wait(10)
    other.close()


def test_a_closed_stream_leaves_nobody_waiting(device):
    stream, done = device.stream(), []
    stream.run(lambda: done.append(1))
    stream.close()
    stream.close()
    stream.run(lambda: done.append(2))
    with pytest.raises(DeviceError, match="closed"):
        stream.record().wait(10)
    assert done == [1]


def test_pins_do_not_overlap(device):
    pages = np.zeros(8 * PAGE, np.uint8)
    at = address_of(pages)
    device.pin(at + 2 * PAGE, 2 * PAGE, True)
    for begin, n in (0, 3), (2, 2), (3, 1), (3, 4), (0, 8):
        with pytest.raises(DeviceError, match="pinned already"):
            device.pin(at + begin * PAGE, n * PAGE, True)
    device.pin(at, 2 * PAGE, False)
    device.pin(at + 4 * PAGE, PAGE, True)
    device.unpin(at + 2 * PAGE)
    device.pin(at + 2 * PAGE, PAGE, True)


def test_copies_are_of_pinned_pages(device, stream):
    pages, array = np.arange(2 * PAGE, dtype=np.uint8), np.zeros(PAGE, np.uint8)
    at = address_of(pages)
    with pytest.raises(DeviceError, match="not pinned"):
        stream.copy(address_of(array), at, PAGE, to_host=False)
    device.pin(at, PAGE, True)
    stream.copy(address_of(array), at, PAGE, to_host=False)
    assert stream.record().wait(10)
    assert (array == pages[:PAGE]).all()
    with pytest.raises(DeviceError, match="not pinned"):
        stream.copy(at + 1, address_of(array), PAGE, to_host=True)
    device.unpin(at)
    with pytest.raises(DeviceError, match="not pinned"):
        device.location().caller().copy(at, address_of(array), 1, to_host=True)


def test_a_place_is_that_of_the_owners_stream(device, stream):
    go = threading.Event()
    stream.run(go.wait)
    location = device.location(stream)
    assert location.caller() is stream
    assert not location.ready.done()
    assert device.location().ready.done()
    go.set()
    assert location.ready.wait(10)


def test_arrays_made_of_one_belong_to_its_stream(stream):
    array = np.zeros(4, "f4").view(HostArray)
    assert array.stream is None
    array.stream = stream
    assert array[1:].stream is stream
    assert (array + 1).stream is stream


def test_a_process_has_one():
    assert host_device() is host_device()
