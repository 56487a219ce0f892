"""Converts TensorFlow's tensors to NumPy arrays and back, without a copy if possible, eagerly and in `tf.function`."""
from __future__ import annotations

from collections.abc import Callable, Sequence
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


def dense(tensor: Any, what: str) -> Any:
    """Return *tensor* as a dense `tf.Tensor`.

    Raises `UnsupportedError`, which names it as *what*, if it is sparse, ragged, or not numeric.
    """
    if isinstance(tensor, tf.IndexedSlices | tf.RaggedTensor | tf.SparseTensor | str | bytes):
        raise UnsupportedError(f"{what} is a {type(tensor).__name__}: only dense tensors and numbers are taken")
    try:
        found = tf.convert_to_tensor(tensor)
    except (TypeError, ValueError) as exc:
        raise UnsupportedError(f"{what} is a {type(tensor).__name__}, of which TensorFlow makes no tensor: {exc}"
                               ) from exc
    if found.dtype.as_numpy_dtype is object or found.dtype in (tf.variant, tf.resource):
        raise UnsupportedError(f"{what} is of dtype {found.dtype.name}: only numbers are taken")
    return found


def without_rows(gradients: Sequence[Any]) -> list[Any]:
    """Return *gradients* with `tf.IndexedSlices` as dense tensors."""
    return [tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in gradients]


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
    """Return an eager CPU tensor that takes over *array* if `empty` made it, else a copy."""
    if array.size and address_of(array) % _ALIGNMENT == 0 and array.dtype != TABLE["bfloat16"].numpy:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


def address_of(array: Array) -> int:
    """Return the address of *array*'s first element."""
    found: int = array.__array_interface__["data"][0]
    return found


class _ArrayFunction:
    """A function of NumPy arrays that returns NumPy arrays, for `tf.numpy_function`: a graph keeps it."""

    __name__ = "bpsfast"

    def __init__(self, run: Callable[..., Sequence[Any]]) -> None:
        self._run = run

    def __call__(self, *arrays: Any) -> list[Array]:
        return [np.asarray(found) for found in self._run(*[np.asarray(array) for array in arrays])]


#: The dtype and the shape of a tensor.
Kind = tuple[Any, Any]


def traced(run: Callable[..., Sequence[Any]], tensors: Sequence[Any], kinds: Sequence[Kind]) -> list[Any]:
    """Return symbolic tensors of *kinds*: what *run* returns for the arrays of *tensors* whenever the graph is run.

    The graph runs such functions in the order in which they were traced.
    """
    results = tf.numpy_function(_ArrayFunction(run), list(tensors), [dtype for dtype, _ in kinds])
    if not kinds:
        return []
    for result, (_, shape) in zip(results, kinds):
        result.set_shape(shape)
    return list(results)


def computed(run: Callable[..., Sequence[Any]], tensors: Sequence[Any], kinds: Sequence[Kind]) -> list[Any]:
    """Return what *run* returns for the arrays of *tensors*, as CPU tensors; while tracing, as `traced`."""
    if any(tf.is_symbolic_tensor(tensor) for tensor in tensors):
        return traced(run, tensors, kinds)
    with tf.device("CPU:0"):
        return [tf.convert_to_tensor(array) for array in run(*[np.asarray(tensor.numpy()) for tensor in tensors])]
