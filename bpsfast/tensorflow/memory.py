"""Memory of TensorFlow's tensors as NumPy's arrays, and the other way: without a copy where TensorFlow allows it."""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from ..base.dtypes import NAMES, TABLE
from ..orchestration.errors import UnsupportedError
from ..trainer.tensor_input import tensor_input

Array = np.ndarray[Any, Any]

#: Memory that TensorFlow takes over begins at a multiple of this: its kernels end the process over any other.
_ALIGNMENT = 64
#: Results from this size on have memory of their own; smaller ones of one call share some.
_OWN_NBYTES = 64 << 10


def wire_dtype(dtype: Any, what: str) -> str:
    """Return the wire name of *what*'s *dtype*; raises `UnsupportedError` if it is not summed."""
    name: str = tf.as_dtype(dtype).name
    if name not in NAMES:
        raise UnsupportedError(f"{what} is of dtype {name}, which cannot be summed; bpsfast sums {', '.join(NAMES)}")
    return name


def array_of(tensor: Any) -> Array:
    """Return the elements of *tensor*, an eager one, to be read only: on the CPU a view; it keeps the tensor alive."""
    if not tensor.backing_device.endswith("CPU:0"):
        with tf.device("CPU:0"):
            tensor = tf.identity(tensor)
    try:
        return np.asarray(memoryview(tensor))
    except ValueError:  # bfloat16, of which the buffer protocol knows nothing
        return tensor_input(tensor).array()


def empty(kinds: Sequence[tuple[tuple[int, ...], str]]) -> list[Array]:
    """Return new arrays of these shapes and dtypes that TensorFlow will take over without a copy."""
    sizes = [prod(shape) * TABLE[dtype].itemsize for shape, dtype in kinds]
    room = [-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in sizes]
    shared = _aligned(sum(n for n, nbytes in zip(room, sizes) if nbytes < _OWN_NBYTES))
    found, begin = [], 0
    for (shape, dtype), nbytes, n in zip(kinds, sizes, room):
        if nbytes < _OWN_NBYTES:
            memory = shared[begin : begin + nbytes]
            begin += n
        else:
            memory = _aligned(nbytes)
        found.append(memory.view(TABLE[dtype].numpy).reshape(shape))
    return found


def _aligned(nbytes: int) -> Array:
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes]


def tensor_of(array: Array) -> Any:
    """Return an eager tensor on the CPU that is *array*, which nobody else goes on to use.

    A copy unless it is `empty`'s.
    """
    if array.size and address_of(array) % _ALIGNMENT == 0 and array.dtype != TABLE["bfloat16"].numpy:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


def address_of(array: Array) -> int:
    """Return where *array* begins."""
    found: int = array.__array_interface__["data"][0]
    return found
