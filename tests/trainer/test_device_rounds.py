"""Device rounds on real ranks: to the host, the sum, and back; what is waited for, and for how long."""
from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.gpu.copies import DeviceCopy
from bpsfast.gpu.host import HostArray, host_device
from bpsfast.orchestration.errors import BusyError, StallError
from bpsfast.trainer import process
from bpsfast.trainer.gpu.devices import DeviceBytes, DeviceRound
from bpsfast.trainer.tensor_input import tensor_input
from tests.support.device_memory import LIMIT_S, deadline, held

N = 3 * 4096


@pytest.fixture
def job(shared_job):
    return shared_job(ranks=(2,), partition_bytes=16384, timeout_s=20)


def on(stream, n=N):
    array = np.full(n, 1.0 + bpsfast.rank(), "f4").view(HostArray)
    array.stream = stream
    return array


def begin(name, source, target):
    """Return the round of *source* to *target*, and its unit."""
    session = process.current()
    bpsfast.declare(name, source.shape, average=False)
    unit = session.tensors.unit(name, LIMIT_S)
    back = None if target is None else DeviceBytes.of(tensor_input(target))
    return session.devices.send(unit, DeviceBytes.of(tensor_input(source)), back), unit


def there_and_back():
    x = on(None)
    sent, unit = begin("back", x, x)
    sent.wait(deadline())
    sent.join(host_device().location().caller())
    return float(x.min()), float(x.max()), sent.done(), unit.in_flight, sent.round == unit.round


def test_there_and_back(job):
    assert job.run(there_and_back) == [(3.0, 3.0, True, False, True)] * 2


def there_only():
    x = on(None)
    sent, unit = begin("there", x, None)
    sent.wait(deadline())
    sent.join(host_device().location().caller())  # nothing is enqueued
    return float(x[0]) == 1.0 + bpsfast.rank(), float(unit.view(sent.round).view("f4").sum()) == 3.0 * N


def test_a_sum_that_nobody_wants_back(job):
    assert job.run(there_only) == [(True, True)] * 2


def waiting_for_the_stream():
    """The deadline of a wait is kept, and says that the stream of this rank is behind; later it goes on."""
    with held(host_device()) as gate:
        x = on(gate.stream)
        sent, _ = begin("held", x, x)
        begun = time.monotonic()
        texts = []
        for wait in sent.wait, sent.wait_departed:
            try:
                wait(time.monotonic() + 0.05)
            except StallError as exc:
                texts.append(str(exc))
        took_s = time.monotonic() - begun
        before = sent.done()
        try:
            begin("held", x, x)
        except BusyError as exc:
            texts.append(str(exc))
        gate.go()
        sent.wait(deadline())
        sent.join(gate.stream)
        gate.stream.record().wait(LIMIT_S)
        return texts, took_s < 5, before, float(x.sum()) == 3.0 * N


def test_the_deadline_names_the_stream(job):
    for texts, is_soon, before, is_right in job.run(waiting_for_the_stream):
        assert len(texts) == 3
        assert all("of 'held' from host did not come in time: the stream" in text for text in texts[:2])
        assert "not waited for" in texts[2]
        assert is_soon
        assert not before
        assert is_right


def read_late():
    """A result is not overwritten while it is copied: the target's stream is two rounds behind."""
    with held(host_device()) as gate:
        late = on(gate.stream)
        seen, rounds = [], []
        for round in range(3):
            x = np.full(N, 10.0 * round, "f4").view(HostArray)
            sent, _ = begin("late", x, late if round == 0 else x)
            rounds.append(sent)
            if round < 2:
                sent.wait(deadline())
        try:
            rounds[2].wait(time.monotonic() + 0.1)
        except StallError as exc:
            seen.append(str(exc))
        gate.go()
        rounds[2].wait(deadline())
        rounds[2].join(host_device().location().caller())
        rounds[0].join(gate.stream)
        gate.stream.record().wait(LIMIT_S)
        return len(seen), late.min(), late.max(), float(x.min())


def test_a_result_is_read_before_it_is_overwritten(job):
    assert [tuple(map(float, each)) for each in job.run(read_late)] == [(1.0, 0.0, 0.0, 40.0)] * 2


def read_late_by_the_host():
    """The same, where the later rounds are pushed from host memory."""
    session = process.current()
    with held(host_device()) as gate:
        late = on(gate.stream)
        sent, unit = begin("late host", on(None), late)
        sent.wait(deadline())
        unit.staging.array[: unit.nbytes].view("f4")[:] = 7
        unit.wait(unit.push(), LIMIT_S)
        timer = threading.Timer(0.2, gate.go)
        timer.start()
        unit.wait(unit.push(), LIMIT_S)
        timer.join()
        sent.join(gate.stream)
        gate.stream.record().wait(LIMIT_S)
        session.retire([unit])
        return float(late.min()), float(late.max())


def test_a_result_is_read_before_a_push_of_the_host_overwrites_it(job):
    assert job.run(read_late_by_the_host) == [(3.0, 3.0)] * 2


def retired():
    """Memory of results is given up once copies of them have ended."""
    session = process.current()
    with held(host_device()) as gate:
        late = on(gate.stream)
        sent, unit = begin("retired", on(None), late)
        sent.wait(deadline())
        timer = threading.Timer(0.2, gate.go)
        timer.start()
        session.retire([unit])
        is_finished = not unit._readers
        timer.join()
        gate.stream.record().wait(LIMIT_S)
        return is_finished, float(late.min()), float(late.max())


def test_a_unit_is_retired_after_its_last_copy(job):
    assert job.run(retired) == [(True, 3.0, 3.0)] * 2


def lost_while_it_comes_back():
    """What has failed on the way there keeps the target's memory until copies to it are done."""
    session = process.current()
    with held(host_device()) as gate:
        late = on(gate.stream)
        bpsfast.declare("lost", late.shape, average=False)
        unit = session.tensors.unit("lost", LIMIT_S)
        unit.staging.array[: unit.nbytes].view("f4")[:] = 7
        round = unit.push()
        result = session.devices.bring(unit, round, DeviceBytes.of(tensor_input(late)))
        result.wait(deadline(), lambda: None)
        copy = DeviceCopy("its way", 0, None)
        copy.end(bpsfast.DeviceError("the rest was lost"))
        text = ""
        try:
            DeviceRound(session, unit, round, copy, result).wait(deadline())
        except bpsfast.DeviceError as exc:
            text = str(exc)
        before = result.is_finished, result.keeps is None
        gate.go()
        after = result.wait_finished(LIMIT_S), result.keeps is None
        unit.wait(round, LIMIT_S)
        return text, before, after, float(late.min())


def test_memory_is_kept_while_the_sum_of_a_lost_round_comes_back(job):
    assert job.run(lost_while_it_comes_back) == [("the rest was lost", (False, False), (True, True), 14.0)] * 2


def failed():
    """A round whose input was lost is given up: pushing again says why."""
    stream = host_device().stream()

    def fail():
        raise ValueError("a bad kernel")

    stream.run(fail)
    sent, _ = begin("failed", on(stream), on(None))
    texts = []
    try:
        sent.wait(deadline())
    except bpsfast.DeviceError as exc:
        texts.append(str(exc))
    done = sent.done()
    try:
        begin("failed", on(None), None)
    except BusyError as exc:
        texts.append(str(exc))
    stream.close()
    return texts, done


def test_what_has_failed_is_done_and_given_up(shared_job):
    job = shared_job(ranks=(2,), partition_bytes=16384, timeout_s=5)
    for texts, done in job.run(failed):
        assert len(texts) == 2
        assert all("a bad kernel" in text for text in texts)
        assert done
