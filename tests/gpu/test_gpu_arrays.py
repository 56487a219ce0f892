"""Arrays of CuPy, and of others that show theirs as CuPy's or by DLPack; Gradients whose arrays are CuPy's."""
from __future__ import annotations

import numpy as np
import pytest

import bpsfast
from bpsfast.orchestration.errors import MismatchError, UnsupportedError

pytestmark = pytest.mark.cuda


def sums(dtype):
    import cupy

    x = (cupy.arange(12).reshape(3, 4) * (bpsfast.rank() + 1)).astype(dtype)
    fresh = bpsfast.push_pull(x, average=False, name=f"cupy {dtype}")
    assert type(fresh) is cupy.ndarray and fresh.dtype == dtype and fresh.shape == (3, 4)
    assert bpsfast.push_pull(x, average=False, name=f"cupy {dtype}", out=x) is x
    return bool((fresh == x).all()), cupy.asnumpy(x).tolist() == (np.arange(12).reshape(3, 4) * 3).tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "int32", "int64", "uint8"])
def test_sums(gpu_job, dtype):
    assert gpu_job.run(sums, dtype) == [(True, True)] * 2


def on_a_stream():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    heavy = cupy.ones((4096, 4096), np.float32)
    cupy.cuda.Device().synchronize()
    with stream:
        x = cupy.zeros(3_000_000, np.float32)
        for round in range(3):
            for _ in range(20):
                heavy = heavy @ heavy * np.float32(1e-7)
            x.fill(bpsfast.rank() + round)
            total = bpsfast.push_pull(x, average=False, name="cupy on a stream")
            x.fill(-1)
            assert bool((total == 1 + 2 * round).all()), round
    return True


def test_a_stream_of_the_users(gpu_job):
    assert gpu_job.run(on_a_stream) == [True, True]


class Shown:
    """What a framework of its own shows of its array: nothing but CUDA's array interface."""

    def __init__(self, array, stream=None):
        interface = dict(array.__cuda_array_interface__)
        interface.pop("stream", None)
        self.__cuda_array_interface__ = interface | ({} if stream is None else {"stream": stream})
        self.array = array


def shown():
    import cupy

    x = cupy.full(100_000, bpsfast.rank() + 1, np.float32)
    unordered = bpsfast.push_pull(Shown(x), average=False, name="shown")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x.fill(bpsfast.rank() + 5)
    ordered = bpsfast.push_pull(Shown(x, stream.ptr), average=False, name="shown")  # on CuPy's current stream
    return type(unordered) is cupy.ndarray and bool((unordered == 3).all()), bool((ordered == 11).all())


def test_the_array_interface(gpu_job):
    assert gpu_job.run(shown) == [(True, True)] * 2


class Exports:
    """What a framework shows that has DLPack only. Counts on which streams it was asked to be ready."""

    def __init__(self, array):
        self.array, self.streams = array, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream)


def exported():
    import cupy

    x = Exports(cupy.full(100_000, bpsfast.rank() + 1, np.float32))
    total = bpsfast.push_pull(x, average=False, name="exported")
    return type(total) is cupy.ndarray and bool((total == 3).all()), len(x.streams) > 0 and None not in x.streams


def test_dlpack(gpu_job):
    assert gpu_job.run(exported) == [(True, True)] * 2


def refused():
    import cupy

    said = []
    x = cupy.zeros((4, 6), np.float32)
    for call in (lambda: bpsfast.push_pull(x.T, name="refused"),
                 lambda: bpsfast.push_pull(x, name="refused", out=np.zeros((4, 6), np.float32)),
                 lambda: bpsfast.push_pull(np.zeros((4, 6), np.float32), name="refused", out=x),
                 lambda: bpsfast.push_pull(x.astype(np.complex64), name="refused"),
                 lambda: bpsfast.push_pull(x, name="refused", out=cupy.zeros(3, np.float32))):
        try:
            call()
        except (UnsupportedError, MismatchError) as exc:
            said.append(str(exc))
        else:
            said.append("taken")
    return said


def test_what_is_refused(gpu_job):
    for transposed, out_on_cpu, out_on_gpu, dtype, shape in gpu_job.run(refused):
        assert "not C-contiguous" in transposed and "ascontiguousarray" in transposed
        assert "input is on cuda:0, out is on the CPU" in out_on_cpu
        assert "input is on the CPU, out is on cuda:0" in out_on_gpu
        assert "complex64" in dtype
        assert "(3,)" in shape


def given():
    import cupy

    x = cupy.full(300_000, bpsfast.rank(), np.float32)
    try:
        bpsfast.broadcast(x, root_rank=1, name="given")
    except UnsupportedError as exc:
        return "cuda:0" in str(exc)  # takes host memory only
    return bool((x == 1).all())


def test_broadcast(gpu_job):
    assert gpu_job.run(given) == [True, True]


LAYERS = {"w1": ((700, 900), "f4"), "b1": ((900,), "f4"), "w2": ((900, 3), "f4"), "half": ((7,), "f2"),
          "nothing": ((0,), "f4")}


def steps(n):
    import cupy

    gradients = bpsfast.Gradients(LAYERS, prefix="far ", device="cuda", average=False)
    for step in range(n):
        for name in reversed(list(gradients)):
            gradients[name][...] = step + bpsfast.rank()
            gradients.ready(name)
        for name in gradients:
            total = gradients.wait(name)
            assert type(total) is cupy.ndarray and total is gradients[name]
            assert bool((total == 2 * step + 1).all()), (step, name)
        gradients.step()
    return True


def test_gradients(gpu_job):
    assert gpu_job.run(steps, 5) == [True, True]


def missing_device():
    said = []
    for device in ("cuda:99", "cuda:x", "gpu"):
        try:
            bpsfast.Gradients({"a": ((3,), "f4")}, device=device)
        except Exception as exc:  # which one is what is asked
            said.append(f"{type(exc).__name__}: {exc}")
    return said


def test_devices_that_are_not_there(gpu_job):
    for absent, number, kind in gpu_job.run(missing_device):
        assert absent.startswith("UnsupportedError: there is no device cuda:99")
        assert number.startswith("ConfigError") and kind.startswith("ConfigError")
