"""TensorFlow's tensors as NumPy arrays, and arrays as tensors, without a copy where TensorFlow allows it."""
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

#: Memory that TensorFlow takes over must be aligned to this: with other memory its kernels abort the process.
_ALIGNMENT = 64
#: Results of at least this size have memory of their own; smaller ones of a call share some.
_OWN_NBYTES = 64 << 10


def wire_dtype(dtype: Any, what: str) -> str:
    """Return the wire name of *what*'s *dtype*; raises `UnsupportedError` if it is not summed."""
    name: str = tf.as_dtype(dtype).name
    if name not in NAMES:
        raise UnsupportedError(f"{what} is of dtype {name}, which cannot be summed; bpsfast sums {', '.join(NAMES)}")
    return name


def array_of(tensor: Any) -> Array:
    """Return the elements of the eager *tensor*, to be read only: on the CPU a view, which keeps the tensor alive."""
    if not tensor.backing_device.endswith("CPU:0"):
        with tf.device("CPU:0"):
            tensor = tf.identity(tensor)
    try:
        return np.asarray(memoryview(tensor))
    except ValueError:  # bfloat16, which the buffer protocol does not have
        return tensor_input(tensor).array()


def empty(kinds: Sequence[tuple[tuple[int, ...], str]]) -> list[Array]:
    """Return new arrays of these (shape, dtype) that TensorFlow can take over without a copy."""
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
    """Return an eager CPU tensor with the elements of *array*, which is not used afterwards: a copy unless it is
    `empty`'s.
    """
    if array.size and address_of(array) % _ALIGNMENT == 0 and array.dtype != TABLE["bfloat16"].numpy:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


def address_of(array: Array) -> int:
    """Return where *array* begins."""
    found: int = array.__array_interface__["data"][0]
    return found
