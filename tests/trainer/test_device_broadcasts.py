"""broadcast of arrays on devices, by real ranks."""
from __future__ import annotations

import threading

import numpy as np
import pytest

import bpsfast
from bpsfast.gpu.host import HostArray, host_device
from bpsfast.orchestration.errors import DeviceError, MismatchError
from bpsfast.trainer import process
from tests.support.device_memory import LIMIT_S, held


@pytest.fixture(params=[(2,), (2, 1)], ids=["one-node", "tcp"])
def ranks(request, shared_job):
    return shared_job(ranks=request.param, transport="auto" if len(request.param) == 1 else "tcp")


@pytest.fixture
def two(shared_job):
    return shared_job(ranks=(2,), transport="auto")


def on_device(x, stream=None):
    x = np.ascontiguousarray(x).view(HostArray)
    x.stream = stream
    return x


def of_all_kinds():
    """Roots in turn, dtypes, no elements, more than the channel holds at once."""
    wrong = []
    for root in range(bpsfast.size()):
        for shape, dtype in ((), "f4"), ((0,), "f4"), ((3, 5), "f8"), ((7,), "i8"), ((3 << 19,), "f4"):
            want = np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape) + 1
            x = on_device(want if bpsfast.rank() == root else np.zeros_like(want))
            got = bpsfast.broadcast(x, root)
            if got is not x or not (x == want).all():
                wrong.append((root, shape, dtype))
    return wrong


def test_all_get_what_the_root_has(ranks):
    assert ranks.run(of_all_kinds) == [[]] * ranks.size


def read_only():
    """What cannot be written is answered by a new array of the kind."""
    stream = host_device().stream()
    x = on_device(np.full(10, 5.0 + bpsfast.rank(), "f4"), stream)
    x.flags.writeable = False
    got = bpsfast.broadcast(x, 1)
    stream.record().wait(LIMIT_S)
    kind = isinstance(got, HostArray), got.stream is stream, got.flags.writeable, got is x
    stream.close()
    return kind, got.tolist() == [6.0] * 10, float(x[0]) == 5.0 + bpsfast.rank()


def test_what_is_read_only_stays(two):
    assert two.run(read_only) == [((True, True, True, False), True, True)] * 2


def in_order():
    """The root sends what its stream computes; others find it on theirs, after what they have enqueued."""
    with held(host_device()) as gate:
        x = on_device(np.zeros(1000, "f4"), gate.stream)
        gate.stream.run(lambda: x.fill(1 + bpsfast.rank()))
        seen = []
        if bpsfast.rank() == 0:
            timer = threading.Timer(0.1, gate.go)
            timer.start()
            bpsfast.broadcast(x, 0)
            timer.join()
        else:
            bpsfast.broadcast(x, 0)  # does not wait for this rank's stream
            seen.append(float(x.sum()))
            gate.stream.run(lambda: seen.append(float(x.sum())))
            gate.go()
        gate.stream.record().wait(LIMIT_S)
        return seen, float(x.sum())


def test_streams_keep_their_order(two):
    assert two.run(in_order) == [([], 1000.0), ([0.0, 1000.0], 1000.0)]


def mixed():
    """A rank's array may be on a device where another's is not."""
    x = np.full(100, 3.0 + bpsfast.rank(), "f4")
    if bpsfast.rank():
        x = on_device(x)
    return [float(bpsfast.broadcast(x, root).sum()) for root in (0, 1)]


def test_devices_and_hosts_together(two):
    assert two.run(mixed) == [[300.0, 300.0]] * 2


def different():
    try:
        bpsfast.broadcast(on_device(np.zeros(3 + bpsfast.rank(), "f4")), 0)
    except MismatchError as exc:
        return str(exc), float(bpsfast.broadcast(on_device(np.ones(2, "f4")), 0).sum())
    return "", float(bpsfast.broadcast(on_device(np.ones(2, "f4")), 0).sum())


def test_a_mismatch_is_told(two):
    (first, second) = two.run(different)
    assert first == ("", 2.0)
    assert "expects broadcast float32 (4,) from rank 0" in second[0]
    assert second[1] == 2.0


def failing():
    """A root whose stream has failed says so, and sends nothing."""
    stream = host_device().stream()

    def fail():
        raise ValueError("a bad kernel")

    stream.run(fail)
    x = on_device(np.zeros(3, "f4"), stream)
    text = ""
    try:
        if bpsfast.rank() == 0:
            bpsfast.broadcast(x, 0)
    except DeviceError as exc:
        text = str(exc)
    stream.close()
    again = float(bpsfast.broadcast(on_device(np.ones(2, "f4")), 0).sum())
    return text, again, len(process.current().devices.staging_buffers._returning)


def test_a_root_that_cannot(two):
    (text, again, _), (_, other, _) = two.run(failing)
    assert "a bad kernel" in text
    assert again == other == 2.0


def by_setting():
    x = np.full(10, 1.0 + bpsfast.rank(), "f4")
    return bpsfast.broadcast(x, 1) is x, float(x.sum()), type(x) is np.ndarray


def test_the_setting_sends_the_hosts_arrays_that_way(shared_job):
    assert shared_job(ranks=(2,), host_device=True).run(by_setting) == [(True, 20.0, True)] * 2
