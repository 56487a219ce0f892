"""Where arrays lie: objects of GPUs are refused in words where there is no way to reach them."""
from __future__ import annotations

import importlib.util
import threading

import numpy as np
import pytest

from bpsfast.gpu import arrays
from bpsfast.gpu.host import HostArray, host_device
from bpsfast.orchestration.errors import UnsupportedError
from bpsfast.trainer.tensor_input import host_input, tensor_input
from tests.support.device_memory import held

without_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
INSTALL = r"CuPy, which is not installed: pip install bpsfast\[cuda\]"


class OfNumba:
    """What Numba's device arrays, and others, say of themselves."""

    def __init__(self, **interface):
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (0x7F0000000000, False),
                                         "strides": None, "version": 3, "stream": 1} | interface


class OfJax:
    """What exports its memory on a GPU by DLPack."""

    def __init__(self, kind=2):
        self.kind = kind
        self.exported = False

    def __dlpack_device__(self):
        return self.kind, 0

    def __dlpack__(self, **options):
        self.exported = True
        raise AssertionError("nobody can read it")


def test_plain_arrays_are_the_cpus():
    assert tensor_input(np.zeros(3, "f4")).location is None
    assert arrays.of_ndarray(np.zeros(3, "f4")) is None
    assert tensor_input(np.zeros(3, "f4").view(np.matrix)).location is None


def test_arrays_of_the_host_device():
    x = np.zeros(3, "f4").view(HostArray)
    location = tensor_input(x).location
    assert location.device is host_device()
    assert location.ready.done()
    with held(host_device()) as gate:
        x.stream = gate.stream
        location = tensor_input(x).location
        assert location.caller() is gate.stream
        assert not location.ready.done()


def test_a_place_is_of_the_moment():
    """What is enqueued after the array was looked at is not waited for."""
    stream = host_device().stream()
    x = np.zeros(3, "f4").view(HostArray)
    x.stream = stream
    location, later = tensor_input(x).location, threading.Event()
    stream.run(lambda: later.wait(20))
    assert location.ready.wait(20)
    later.set()
    stream.close()


@without_cupy
@pytest.mark.parametrize("interface", [{}, {"stream": None}, {"shape": (0,), "data": (0, False)}, {"version": 2}])
def test_an_array_interface_says_what_to_install(interface):
    with pytest.raises(UnsupportedError, match=INSTALL):
        tensor_input(OfNumba(**interface))


@without_cupy
@pytest.mark.parametrize("kind", [2, 10])
def test_dlpack_of_a_gpu_says_what_to_install(kind):
    x = OfJax(kind)
    with pytest.raises(UnsupportedError, match=INSTALL):
        tensor_input(x)
    assert not x.exported


@pytest.mark.parametrize(("interface", "text"), [
    ({"typestr": "<c8"}, "complex64"), ({"mask": object()}, "mask"), ({"strides": (8,)}, "not C-contiguous")])
def test_what_is_not_summed_is_refused_before(interface, text):
    with pytest.raises(UnsupportedError, match=text):
        tensor_input(OfNumba(**interface))


def test_other_devices_are_named():
    with pytest.raises(UnsupportedError, match="lives on Metal device 0: copy it to the CPU"):
        tensor_input(OfJax(8))


def test_calls_that_read_the_host_only():
    x = np.zeros(3, "f4")
    assert host_input(x).address == x.ctypes.data
    with pytest.raises(UnsupportedError, match="lies on host, which this call does not support: copy it"):
        host_input(x.view(HostArray))
