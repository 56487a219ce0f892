"""New arrays on devices."""
from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from bpsfast.gpu import arrays
from bpsfast.gpu.host import HostArray, host_device
from bpsfast.orchestration.errors import ConfigError, UnsupportedError
from bpsfast.trainer.tensor_input import tensor_input

torch = pytest.importorskip("torch")
HAS_CUPY = importlib.util.find_spec("cupy") is not None


@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_zeros_of_the_host_device(dtype, shape):
    made = arrays.zeros(shape, dtype, "host")
    assert isinstance(made, HostArray)
    assert made.shape == shape
    assert not made.view(np.uint8).any() if shape else True
    found = tensor_input(made)
    assert (found.dtype, found.shape, found.writable) == (dtype, shape, True)
    assert found.location.device is host_device()


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "host:0", "CUDA", "cpu"])
def test_names_that_are_none(device):
    with pytest.raises(ConfigError, match="expected 'cuda'"):
        arrays.zeros((1,), "float32", device)


@pytest.mark.skipif(HAS_CUPY, reason="CuPy is installed")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:17"])
def test_a_gpu_without_cupy_says_what_to_install(device):
    with pytest.raises(UnsupportedError, match=r"pip install bpsfast\[cuda\]"):
        arrays.zeros((1,), "float32", device)


def test_like_an_array_of_a_stream():
    stream = host_device().stream()
    x = np.ones((3, 2), "f8").view(HostArray)
    x.stream = stream
    made = tensor_input(x).empty_like()
    assert isinstance(made, HostArray)
    assert (made.shape, made.dtype, made.stream) == (x.shape, x.dtype, stream)
    assert made.ctypes.data != x.ctypes.data
    stream.close()


def test_like_a_read_only_array():
    x = np.ones(3, "f4").view(HostArray)
    x.flags.writeable = False
    assert tensor_input(x).empty_like().flags.writeable


def test_like_a_tensor():
    from dataclasses import replace

    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    memory = replace(tensor_input(x.detach()), location=host_device().location())
    made = memory.empty_like()
    assert isinstance(made, torch.Tensor)
    assert (made.shape, made.dtype, made.requires_grad) == (x.shape, x.dtype, False)
