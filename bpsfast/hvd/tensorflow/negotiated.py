"""Operations that `bpsfast.hvd.torch` negotiates and executes, on TensorFlow's tensors, also inside `tf.function`.

PyTorch is loaded with the first of them, and on all ranks: they meet there.
"""
from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...orchestration.errors import ConfigError, UnsupportedError
from ...tensorflow.memory import array_of
from ...trainer import process
from ..process_sets import ProcessSet, global_process_set

Array = np.ndarray[Any, Any]


def is_global(process_set: ProcessSet) -> bool:
    """Return whether *process_set* is that of all ranks; raises `ConfigError` if it is no process set."""
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(f"process_set={process_set!r} is a {type(process_set).__name__}, not a ProcessSet: give what "
                          "add_process_set has returned")
    return process_set is global_process_set


def begun(what: str) -> Any:
    """Return `bpsfast.hvd.torch`, after its `init`; *what* asks for it.

    Raises
    ------
    ClosedError
        Before `init`.
    UnsupportedError
        Where there is no PyTorch.
    """
    process.current()
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(f"{what} needs PyTorch here, which executes what ranks negotiate: pip install "
                               "'bpsfast[torch]' (allreduce, broadcast and gradients of all ranks do without)")
    api = importlib.import_module("bpsfast.hvd.torch")
    api.init()
    return api


def dense(tensor: Any, what: str) -> Any:
    """Return *tensor* as a dense one; raises `UnsupportedError` if it is none, or one of strings."""
    if isinstance(tensor, tf.IndexedSlices | tf.RaggedTensor | tf.SparseTensor | str | bytes):
        raise UnsupportedError(f"{what} of a {type(tensor).__name__}: only dense tensors are taken")
    found = tf.convert_to_tensor(tensor)
    if found.dtype.as_numpy_dtype is object or found.dtype in (tf.variant, tf.resource):
        raise UnsupportedError(f"{what} of a tensor of dtype {found.dtype.name}: only numbers are taken")
    return found


def made(run: Callable[..., Sequence[Array]], tensors: Sequence[Any], kinds: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return what *run* makes of the arrays of *tensors*, as tensors of these *kinds*: (dtype, shape).

    Inside `tf.function` it is run in the order of the program.
    """
    if not any(tf.is_symbolic_tensor(tensor) for tensor in tensors):
        with tf.device("CPU:0"):
            return [tf.convert_to_tensor(array) for array in run(*[array_of(tensor) for tensor in tensors])]

    def traced(*arrays: Any) -> list[Array]:
        return [np.asarray(array) for array in run(*[np.asarray(array) for array in arrays])]

    results = tf.numpy_function(traced, list(tensors), [dtype for dtype, _ in kinds])
    for result, (_, shape) in zip(results, kinds):
        result.set_shape(shape)
    return list(results)


def differentiable(run: Callable[..., list[Any]], back: Callable[..., list[Any]], tensors: Sequence[Any]) -> list[Any]:
    """Return *run* of *tensors*, whose gradient is *back* of the results' gradients if they are floating-point ones."""
    if not all(tensor.dtype.is_floating for tensor in tensors):
        return run(*tensors)

    @tf.custom_gradient
    def operation(*given: Any) -> Any:
        return run(*given), lambda *gradients: back(*gradients)

    found = operation(*tensors)
    return list(found) if isinstance(found, list | tuple) else [found]


def rows_of(tensor: Any) -> tf.TensorShape:
    """Return the shape of *tensor* with any number of rows."""
    shape: tf.TensorShape = tensor.shape
    return tf.TensorShape([None]).concatenate(shape[1:]) if shape.rank else tf.TensorShape(None)
