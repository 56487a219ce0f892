"""Devices in trouble: kernels that fail, ranks that are lost while a stream stands still, Ctrl-C, forks, leaks."""
from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np

import bpsfast
from bpsfast.gpu.host import HostArray, host_device
from bpsfast.orchestration.errors import BpsError, BusyError, ClosedError, DeviceError
from bpsfast.trainer import process
from bpsfast.trainer.gradients import Gradients
from tests.support.device_memory import LIMIT_S, eventually, held


def on_device(n=1000, value=1.0, stream=None):
    x = np.full(n, value, "f4").view(HostArray)
    x.stream = stream
    return x


def fail():
    raise ValueError("a bad kernel")


def a_kernel_fails(ends):
    """On rank 1 a kernel before the push fails. Others are told who is missing: at the deadline, or when it *ends*."""
    bpsfast.push_pull(on_device(), name="failing")
    stream = host_device().stream()
    if bpsfast.rank() == 1:
        stream.run(fail)
    x = on_device(stream=stream)
    handle = bpsfast.push_pull_async(x, name="failing", out=x)
    error = None
    try:
        handle.wait()
    except BpsError as exc:
        error = exc
    stream.close()
    is_done = handle.done()
    if ends and isinstance(error, DeviceError):
        process.current().close(clean=False, reason=f"rank {bpsfast.rank()}: {error}")
    return type(error).__name__, str(error), is_done


def test_a_failing_kernel_is_that_ranks_and_named_elsewhere(job):
    missing, failed, third = job(ranks=(2, 1), transport="tcp", timeout_s=5).run(a_kernel_fails, False)
    assert failed[0] == "DeviceError"
    assert "a bad kernel" in failed[1]
    assert failed[2], "who polls it must not wait for ever"
    for name, text, _ in missing, third:
        assert name == "StallError"
        assert "rank 1" in text


def test_a_rank_that_ends_by_it_ends_the_others(job):
    started = job(ranks=(2,), timeout_s=30)
    begun = time.monotonic()
    (other, text, _), (failed, _, _) = started.run(a_kernel_fails, True)
    assert (other, failed) == ("PeerLostError", "DeviceError")
    assert "a bad kernel" in text
    assert time.monotonic() - begun < 15
    started.kill()


def pushed_after_a_failure():
    """What comes after a failure of the device says so at once; the host goes on."""
    stream = host_device().stream()
    stream.run(fail)
    texts = []
    for name, x in (("first", on_device(stream=stream)), ("second", on_device())):
        try:
            bpsfast.push_pull(x, name=name)
        except DeviceError as exc:
            texts.append("a bad kernel" in str(exc))
    try:
        bpsfast.push_pull(on_device(), name="first")
    except BusyError as exc:
        texts.append("use another name" in str(exc))
    stream.close()
    return texts, float(bpsfast.push_pull(np.ones(3, "f4"), name="third").sum())


def test_a_failed_device_stays_failed(job):
    assert job(ranks=(1,)).run(pushed_after_a_failure) == [([True] * 3, 3.0)]


def waits_for_its_stream():
    """Rank 0 waits for its own stream, while rank 1 dies."""
    with held(host_device()) as gate:
        handle = bpsfast.push_pull_async(on_device(stream=gate.stream), name="standing")
        bpsfast.barrier()
        if bpsfast.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            handle.wait()
        except BpsError as exc:
            return type(exc).__name__, str(exc), time.monotonic() - begun


def test_a_lost_rank_is_heard_of_while_a_stream_stands_still(job):
    started = job(ranks=(2,), timeout_s=40)
    waiting, lost = started.attempt(waits_for_its_stream)
    assert lost.error == "died"
    name, text, took_s = waiting.value
    assert name == "PeerLostError"
    assert "rank 1" in text
    assert took_s < 20
    started.kill()


def interrupted():
    """Ctrl-C ends a wait for a stream; the handle is still good."""
    with held(host_device()) as gate:
        x = on_device(stream=gate.stream)
        handle = bpsfast.push_pull_async(x, name="interrupted", out=x)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        is_interrupted = False
        try:
            handle.wait()
        except KeyboardInterrupt:
            is_interrupted = True
        timer.join()
        gate.go()
        handle.wait()
        gate.stream.record().wait(LIMIT_S)
        return is_interrupted, float(x.sum())


def test_ctrl_c(job):
    assert job(ranks=(2,)).run(interrupted) == [(True, 1000.0)] * 2


def forked():
    """A fork of a rank has no session, nor its copy threads."""
    with held(host_device()) as gate:
        handle = bpsfast.push_pull_async(on_device(stream=gate.stream), name="forked")
        pid = os.fork()
        if pid == 0:
            n_right = 0
            for call in (lambda: bpsfast.push_pull(on_device(), name="child"), handle.wait,
                         lambda: bpsfast.broadcast(on_device(), 0)):
                try:
                    call()
                except ClosedError:
                    n_right += 1
            os._exit(n_right)
        _, status = os.waitpid(pid, 0)
        gate.go()
        total = handle.wait()
        gate.stream.record().wait(LIMIT_S)
        return os.waitstatus_to_exitcode(status), float(total.sum())


def test_forks(job):
    assert job(ranks=(2,), timeout_s=20).run(forked) == [(3, 1000.0)] * 2


def many_rounds():
    """Threads, descriptors and what is remembered do not grow with rounds, streams and tensors."""
    session = process.current()
    g = Gradients({f"t{i}": ((50 + i,), "f4") for i in range(20)}, device="host", prefix="many ")
    seen = []
    for round in range(60):
        stream = host_device().stream()
        x = on_device(stream=stream)
        bpsfast.push_pull(x, name="rounds", out=x)
        for name in g:
            g.ready(name)
        g.step()
        bpsfast.broadcast(x, 0)
        stream.record().wait(LIMIT_S)
        stream.close()
        if round in (20, 59):
            threads = session.devices._threads["host"]
            eventually(lambda: session.devices.staging_buffers.reap() or not session.devices.staging_buffers._returning)
            n_readers = max(len(unit._readers) for unit in session.tensors.units())
            seen.append((len(os.listdir("/proc/self/fd")), n_readers <= 2, len(threads.to_host._copying)))
    return seen[0] == seen[1], seen[1][1:]


def test_nothing_grows(job):
    assert job(ranks=(2,)).run(many_rounds) == [(True, (True, 0))] * 2


def beside_each_other():
    """Two threads, each with a stream of its own."""
    size, wrong = bpsfast.size(), []

    def train(number):
        stream = host_device().stream()
        for round in range(20):
            x = on_device(20_000, 0, stream)
            stream.run(lambda x=x, round=round: x.fill(number + round + bpsfast.rank()))
            bpsfast.push_pull(x, average=False, name=f"thread {number}", out=x)
            total = size * (number + round) + sum(range(size))
            stream.run(lambda x=x, total=total: (x == total).all() or wrong.append((number, total)))
        stream.record().wait(LIMIT_S)
        stream.close()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_threads_with_streams(job):
    assert job(ranks=(2, 1), transport="tcp").run(beside_each_other) == [[]] * 3


def waits_for_a_sum():
    """Streams that wait for other ranks' sums of other streams: what a collective beside us does."""
    rank, first = bpsfast.rank(), threading.Event()
    blocked = host_device().stream()
    blocked.run(lambda: first.wait(LIMIT_S))  # ends once another sum is here, which needs the other rank
    a = bpsfast.push_pull_async(on_device(stream=blocked), average=False, name=f"blocked {rank}") if rank == 0 else None
    b = bpsfast.push_pull(on_device(), average=False, name="free")
    first.set()
    a = a or bpsfast.push_pull_async(on_device(stream=blocked), average=False, name="blocked 0")
    total = a.wait()
    blocked.record().wait(LIMIT_S)
    blocked.close()
    return float(b[0]), float(total[0])


def test_a_stream_that_waits_for_a_sum_does_not_hold_it_up(job):
    assert job(ranks=(2,), timeout_s=10).run(waits_for_a_sum) == [(2.0, 2.0)] * 2
