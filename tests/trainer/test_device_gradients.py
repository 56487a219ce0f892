"""Gradients on a device, by real jobs: bit-equal to the same in shared memory."""
from __future__ import annotations

import threading

import numpy as np
import pytest

import bpsfast
from bpsfast.gpu.host import HostArray, host_device
from bpsfast.trainer.gradients import Gradients
from bpsfast.trainer.tensor_input import tensor_input
from bpsfast.trainer.tuning_search import TuningPoint
from tests.support.device_arrays import Stream, same, values
from tests.support.device_memory import LIMIT_S, Slow, eventually, held
from tests.trainer.test_tuning_in_training import LAYOUTS, Tour

pytestmark = pytest.mark.matrix
SHAPES = [((2,), 0), ((2, 2), 0), ((2, 1), 1)]
LAYERS = {"w": ((300, 100), "f4"), "b": ((100,), "f4"), "half": ((33,), "f2"), "scale": ((), "f4"),
          "nothing": ((0,), "f4"), "big": ((90000,), "f4")}
NAMES = {"f4": "float32", "f2": "float16"}


@pytest.fixture(params=SHAPES, ids=["2", "2+2", "2+1+helper"])
def ranks(request, shared_job):
    shape, helpers = request.param
    return shared_job(ranks=shape, helpers=helpers, transport="tcp" if len(shape) > 1 else "auto",
                      partition_bytes=65536, timeout_s=30)


def gradients_of(prefix, steps, **options):
    """Return the sums of *steps* steps by Gradients in shared memory, and by Gradients on the device."""
    found = {}
    for device in None, "host":
        g = Gradients(LAYERS, prefix=f"{prefix} {device} ", device=device, **options)
        sums = found[device] = []
        for step in range(steps):
            for place, name in enumerate(reversed(list(g))):
                g[name][...] = values(LAYERS[name][0], NAMES[LAYERS[name][1]], step * 100 + place)
                g.ready(name)
            sums.append({name: np.array(g.wait(name)) for name in g})
            g.step()
    return found[None], found["host"]


def by_gradients(group_small, average):
    on_host, on_device = gradients_of(f"by {group_small} {average}", 4, group_small=group_small, average=average)
    return [(step, name) for step, (a, b) in enumerate(zip(on_host, on_device)) for name in a
            if not same(a[name], b[name])]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("group_small", [True, False])
def test_gradients(ranks, group_small, average):
    assert ranks.run(by_gradients, group_small, average) == [[]] * ranks.size


def without_waiting():
    """The end of a step that nobody waits for: `finish`, then the next gradient."""
    g = Gradients(LAYERS, prefix="unwaited ", average=False, device="host")
    wrong = []
    for step in range(4):
        for name in reversed(list(g)):
            if step:
                g.finish(name)
            g[name][...] = step + bpsfast.rank()
        for name in reversed(list(g)):
            g.ready(name)
        g.step(wait=False)
        for name in g:
            total = sum(step + rank for rank in range(bpsfast.size()))
            if not (np.asarray(g.wait(name)) == total).all():
                wrong.append((step, name))
    for name in g:
        g.finish(name)
    return wrong


def test_steps_that_are_not_waited_for(ranks):
    assert ranks.run(without_waiting) == [[]] * ranks.size


def missing():
    """Zeros for what is missing, on one rank or on all, fused or not; the sums are on the device all the same."""
    g = Gradients(LAYERS, prefix="missing ", average=False, device="host")
    seen = []
    for step in range(4):
        names = [name for i, name in enumerate(g) if (i + step + bpsfast.rank()) % 3]
        for name in names:
            g[name][...] = 1
            g.ready(name)
        zeroed = set(g.zero_missing())
        g.step()
        for i, name in enumerate(g):
            total = sum(bool((i + step + rank) % 3) for rank in range(bpsfast.size()))
            if not (np.asarray(g.wait(name)) == total).all() or (name in zeroed) == (name in names):
                seen.append((step, name, total))
    return seen


def test_missing_gradients_are_zeros(ranks):
    assert ranks.run(missing) == [[]] * ranks.size


def filled_from():
    """From streams, and to others: `fill_from` with a target, without, and delivered to several."""
    g = Gradients(LAYERS, prefix="filled ", average=False)
    wrong = []
    with Stream() as one, Stream() as other:
        for step in range(4):
            on_device = {name: one.on_device(np.full(shape, step + bpsfast.rank(), dtype))
                   for name, (shape, dtype) in LAYERS.items()}
            back = {name: other.on_device(np.zeros(shape, dtype)) for name, (shape, dtype) in LAYERS.items()}
            for name in g:
                target = {0: None, 1: tensor_input(back[name]), 2: tensor_input(on_device[name])}[step % 3]
                g.fill_from(name, tensor_input(on_device[name]), target)
            for name in g:
                g.deliver_to(name, tensor_input(back[name]))
                g.deliver_to(name, tensor_input(on_device[name]))
            total = sum(step + rank for rank in range(bpsfast.size()))
            for name in g:
                if not (other.on_host(back[name]) == total).all() or not (one.on_host(on_device[name]) == total).all():
                    wrong.append((step, name))
            g.step()
    return wrong


def test_gradients_of_streams(ranks):
    assert ranks.run(filled_from) == [[]] * ranks.size


def tuned():
    """Editions with other partitions and fusion come and go under gradients on a device, whose streams are late."""
    g = Gradients(LAYERS, prefix="tuned ", average=False, device="host")
    points = [TuningPoint(*sizes[:2], 1 << 20 + i, sizes[2]) for i, sizes in enumerate(LAYOUTS)]
    if g._tuner._runner is not None:
        g._tuner._runner = Tour(g._tuner._runner.decision.active, points)
    wrong, editions = [], set()
    with Stream() as stream:
        elsewhere = {name: stream.on_device(np.zeros(shape, dtype)) for name, (shape, dtype) in LAYERS.items()}
        for step in range(8 * len(LAYOUTS) + 16):
            for name in reversed(list(g)):
                g[name][...] = step % 7 + bpsfast.rank()
                g.ready(name)
            for name in g:
                g.deliver_to(name, tensor_input(elsewhere[name]))
                stream.check(elsewhere[name], 2 * (step % 7) + 1, wrong)
                if not (np.asarray(g.wait(name)) == 2 * (step % 7) + 1).all():
                    wrong.append((step, name))
            editions.add(g._layout.sizes)
            g.step(wait=step % 2 == 0)
            for name in g:
                g.finish(name)
    return wrong, len(editions)


def test_layouts(shared_job, tmp_path):
    job = shared_job(ranks=(2,), autotune=True, tuned_dir=str(tmp_path))
    (wrong, n_layouts), (others_wrong, n_others) = job.run(tuned)
    assert wrong == others_wrong == []
    assert n_layouts == n_others >= 3, "one that comes late, on a busy machine, is left out"


def while_the_stream_stands_still():
    """A whole backward pass, and push_pull_async of all gradients, while the stream stands still; values in its order.
    """
    with held(host_device()) as gate:
        gradients = Gradients({f"g{i}": ((1000,), "f4") for i in range(8)}, average=False, prefix="lag ",
                                      device="host")
        for name in gradients:
            gradients[name].stream = gate.stream
            gate.stream.run(lambda name=name: gradients[name].fill(bpsfast.rank() + int(name[1:])))
            gradients.ready(name)
        x = np.zeros(1000, "f4").view(HostArray)
        x.stream = gate.stream
        gate.stream.run(lambda: x.fill(7))
        handle = bpsfast.push_pull_async(x, average=False, name="lag", out=x)
        gate.stream.run(lambda: None)
        early = float(x.sum()), bpsfast.poll(handle)
        timer = threading.Timer(0.05, gate.go)
        timer.start()
        for name in gradients:
            gradients.wait(name)
        bpsfast.synchronize(handle)
        gradients.step()
        timer.join()
        gate.stream.record().wait(LIMIT_S)
        return early, [float(gradients[name][0]) for name in gradients], float(x[0])


def test_ready_never_waits_for_the_stream(shared_job):
    job = shared_job(ranks=(2,))
    assert job.run(while_the_stream_stands_still) == [((0.0, False), [2.0 * i + 1 for i in range(8)], 14.0)] * 2


def written_after_the_step(ends):
    """The next gradient, which the owner's stream writes once the step is over, is not overwritten by the last sum."""
    device, made = host_device(), []

    def slow():
        made.append(Slow(device))
        return made[-1]

    with Stream() as owner:
        stream = owner.on_device(np.zeros(1, "f4")).stream
        device.stream = slow  # of the copy threads: copies happen when the test says so
        g = Gradients({"x": ((1000,), "f4"), "y": ((10,), "f4")}, average=False, device="host", prefix=f"{ends} ")
        for name in g:
            g[name].stream = stream
            stream.run(lambda name=name: g[name].fill(1))
            g.ready(name)
        eventually(lambda: made and made[0].order)
        made[0].go(2)  # to the host
        g.step(wait=ends == "step")
        if ends == "finish":
            for name in g:
                g.finish(name)
        for name in g:
            stream.run(lambda name=name: g[name].fill(5))
        made[1].go(2)  # and back
        del device.stream
        return [owner.on_host(g[name]).tolist() == [5.0] * g[name].size for name in g]


@pytest.mark.parametrize("ends", ["step", "finish"])
def test_the_next_gradient_comes_after_the_last_sum(job, ends):
    assert job(ranks=(2,)).run(written_after_the_step, ends) == [[True, True]] * 2
