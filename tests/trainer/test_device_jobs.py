"""push_pull of arrays on a device, by real jobs: bit-equal to the same of host memory."""
from __future__ import annotations

import numpy as np
import pytest

import bpsfast
from bpsfast import compression
from bpsfast.base.dtypes import TABLE
from bpsfast.gpu.host import HostArray
from bpsfast.trainer import process
from bpsfast.trainer.gradients import Gradients
from tests.support.device_arrays import Stream, same, values

pytestmark = pytest.mark.matrix
SHAPES = [((2,), 0), ((2, 2), 0), ((2, 1), 1)]


@pytest.fixture(params=SHAPES, ids=["2", "2+2", "2+1+helper"])
def ranks(request, shared_job):
    shape, helpers = request.param
    return shared_job(ranks=shape, helpers=helpers, transport="tcp" if len(shape) > 1 else "auto",
                      partition_bytes=65536, timeout_s=30)


@pytest.fixture
def two(shared_job):
    return shared_job(ranks=(2,), partition_bytes=65536, timeout_s=30)


def pushed(shape, dtype, form, average):
    """Push the same from a device and from the host, three rounds each; return the first round that differs."""
    name = f"pushed {shape} {dtype} {form} {average}"
    with Stream() as stream:
        for round in range(3):
            x = values(shape, dtype, round)
            want = bpsfast.push_pull(x.copy(), average, f"{name} on_host")
            on_device = stream.on_device(x)
            out = {"new": None, "out": stream.on_device(np.zeros_like(x)), "in place": on_device, "async": None}[form]
            if form == "async":
                got = bpsfast.synchronize(bpsfast.push_pull_async(on_device, average, f"{name} on_device"))
            else:
                got = bpsfast.push_pull(on_device, average, f"{name} on_device", out=out)
            if out is not None and got is not out:
                return round, "is not out"
            if not isinstance(got, HostArray) or not same(stream.on_host(got), want):
                return round, "differs"
            if form != "in place" and not same(stream.on_host(on_device), x):
                return round, "the input changed"
    return None


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("form", ["new", "out", "in place", "async"])
@pytest.mark.parametrize(("shape", "dtype"), [((100_003,), "float32"), ((7, 3), "bfloat16"), ((50_000,), "int32"),
                                              ((), "float64"), ((0, 4), "float32"), ((1000,), "uint8")])
def test_push_pull(ranks, shape, dtype, form, average):
    assert ranks.run(pushed, shape, dtype, form, average) == [None] * ranks.size


def deferred(n):
    """Pushes before other ranks have declared the names, in another order on each; none waits for another."""
    order = np.random.default_rng(bpsfast.rank()).permutation(n)
    with Stream() as stream:
        on_device = {i: stream.on_device(np.full(1000 + i, 1.0 + bpsfast.rank(), "f4")) for i in range(n)}
        handles = {i: bpsfast.push_pull_async(on_device[i], False, f"deferred {i}", out=on_device[i]) for i in order}
        for i in reversed(order):
            bpsfast.synchronize(handles[i])
        total = bpsfast.size() * (bpsfast.size() + 1) / 2
        return [i for i in range(n) if not (stream.on_host(on_device[i]) == total).all()]


def test_names_that_others_declare_later(ranks):
    assert ranks.run(deferred, 20) == [[]] * ranks.size


def compressed(codec):
    """Compressed sums, which have state, of both kinds of memory."""
    choice = {"float16": compression.float16(), "onebit": compression.onebit(error_feedback=True),
              "topk": compression.topk(0.01, error_feedback=True)}[codec]
    with Stream() as stream:
        for round in range(4):
            x = values((100_000,), "float32", round)
            options = {"compression": choice, "learning_rate": 0.1 / (1 + round)}
            want = bpsfast.push_pull(x.copy(), name=f"{codec} on_host", **options)
            got = bpsfast.push_pull(stream.on_device(x), name=f"{codec} on_device", **options)
            if not same(stream.on_host(got), want):
                return round
    return None


@pytest.mark.parametrize("codec", ["float16", "onebit", "topk"])
def test_compressed_sums(ranks, codec):
    assert ranks.run(compressed, codec) == [None] * ranks.size


def many_partitions():
    """Thousands of partitions in the time that takes, not its square."""
    n = 4000
    with Stream() as stream:
        x = stream.on_device(np.full(1024 * n, 1.0 + bpsfast.rank(), "f4"))
        bpsfast.push_pull(x, average=False, name="many", out=x)
        return float(stream.on_host(x).sum(dtype="f8")) == 3.0 * 1024 * n


def test_many_partitions(shared_job):
    job = shared_job(ranks=(2,), partition_bytes=4096, timeout_s=30)
    assert job.run(many_partitions) == [True] * 2


def with_the_setting():
    """Plain arrays go over the host device, by every form of the call."""
    wrong = []
    for average in True, False:
        for shape, dtype in ((50_000,), "float32"), ((3,), "int64"), ((), "bfloat16"), ((0,), "float32"):
            x = values(shape, dtype)
            on_host = Gradients({"x": (shape, TABLE[dtype].numpy)}, prefix=f"setting {average} {shape} ",
                                average=average)
            on_host["x"][...] = x
            on_host.ready("x")
            want = np.array(on_host.wait("x"))
            on_host.step()
            name = f"with {average} {shape}"
            for got in (bpsfast.push_pull(x, average, name), bpsfast.push_pull(x, average, name, out=x.copy()),
                        bpsfast.synchronize(bpsfast.push_pull_async(x, average, name)), ):
                if type(got) is not np.ndarray or not same(got, want):
                    wrong.append((average, shape))
    threads = process.current().devices._threads
    return wrong, list(threads)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_the_setting(shared_job, shape):
    job = shared_job(ranks=shape, host_device=True, transport="tcp" if len(shape) > 1 else "auto",
                     partition_bytes=65536)
    assert job.run(with_the_setting) == [([], ["host"])] * sum(shape)
