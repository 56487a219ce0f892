"""What may be pushed, and what is refused in which words."""
from __future__ import annotations

import array

import ml_dtypes
import numpy as np
import pytest
import torch

from bpsfast.base.dtypes import NAMES, TABLE
from bpsfast.orchestration.errors import UnsupportedError
from bpsfast.trainer.tensor_input import tensor_input


@pytest.mark.parametrize("name", NAMES)
def test_arrays_of_every_dtype(name):
    x = np.zeros((3, 5), TABLE[name].numpy)
    found = tensor_input(x)
    assert (found.address, found.shape, found.dtype, found.nbytes) == (x.ctypes.data, (3, 5), name, x.nbytes)
    assert found.writable and found.array() is x


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (2, 3, 4)])
def test_any_shape(shape):
    found = tensor_input(np.ones(shape, "f4"))
    assert found.shape == shape and found.nbytes == 4 * int(np.prod(shape))


def test_a_numpy_scalar_is_zero_dimensional():
    assert tensor_input(np.float64(2.5)).shape == ()
    assert tensor_input(np.float64(2.5)).array()[()] == 2.5


def test_read_only_memory_is_seen():
    x = np.zeros(3, "f4")
    x.flags.writeable = False
    assert not tensor_input(x).writable
    assert not tensor_input(b"abc").writable


@pytest.mark.parametrize(("x", "dtype"), [
    (b"abcd", "uint8"), (bytearray(4), "uint8"), (array.array("d", [1]), "float64"), (array.array("q", [1]), "int64"),
    (memoryview(np.zeros((2, 2), "f2")), "float16"),
])
def test_buffers(x, dtype):
    assert tensor_input(x).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64,
                                   torch.uint8])
def test_torch_tensors_by_dlpack(dtype):
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    found = tensor_input(tensor)
    assert found.address == tensor.data_ptr()
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert found.array().astype("f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    if dtype == torch.bfloat16:
        assert found.array().dtype == ml_dtypes.bfloat16


def test_dlpack_keeps_the_memory_alive():
    view = tensor_input(torch.full((1 << 16,), 7.0)).array()
    other = torch.zeros(1 << 16)
    assert (view == 7).all() and not other.any()


def test_a_dlpack_slice_begins_at_its_offset():
    tensor = torch.arange(10, dtype=torch.float32)[4:]
    assert tensor_input(tensor).array().tolist() == [4, 5, 6, 7, 8, 9]


def test_zero_size_tensor():
    found = tensor_input(torch.zeros(3, 0))
    assert (found.shape, found.nbytes, found.array().shape) == ((3, 0), 0, (3, 0))


class _OldProducer:
    """A producer that knows DLPack 0.x only."""

    def __init__(self, x):
        self.x = x

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self.x.__dlpack__()


class _OnGpu(_OldProducer):
    def __dlpack_device__(self):
        return 2, 0


def test_old_dlpack_is_read_only():
    found = tensor_input(_OldProducer(np.arange(3, dtype="i4")))
    assert found.array().tolist() == [0, 1, 2] and not found.writable


@pytest.mark.parametrize(("x", "text"), [
    (np.zeros((4, 4), "f4").T[1:], "np.ascontiguousarray"),
    (np.zeros((4, 4), "f4")[:, ::2], "np.ascontiguousarray"),
    (np.asfortranarray(np.zeros((4, 4), "f4")), "np.ascontiguousarray"),
    (torch.zeros(4, 4).t(), r"\.contiguous\(\)"),
    (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), r"\.contiguous\(\)"),
    (np.zeros(3, "u2"), "bfloat16"),
    (np.zeros(3, ">f4"), "byte-swapped"),
    (np.zeros(3, "?"), "bool"),
    (np.zeros(3, "c8"), "complex64"),
    (np.zeros(3, object), "Python objects"),
    (np.array(["a"]), "cannot be summed"),
    (torch.zeros(3, dtype=torch.complex64), "complex"),
    (torch.zeros(3, dtype=torch.bool), "bool"),
    (torch.zeros(3, requires_grad=True), "refuses to export"),
    (array.array("H", [1]), "bfloat16"),
    (_OnGpu(np.zeros(3)), "CuPy"),
    (3.0, "np.asarray"),
    ([1, 2], "np.asarray"),
    (None, "np.asarray"),
    ("text", "np.asarray"),
])
def test_what_is_refused(x, text):
    with pytest.raises(UnsupportedError, match=text):
        tensor_input(x)
