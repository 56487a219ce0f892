"""The TensorFlow rows of `bench frameworks`: the sum of a list of tensors, eagerly and inside `tf.function`."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bpsfast.tensorflow.ops import reduced


def eager(arrays: Sequence[np.ndarray[Any, Any]]) -> Callable[[], list[Any]]:
    """Return a function that sums *arrays* eagerly."""
    tensors = [tf.constant(array) for array in arrays]
    names = [f"tensorflow eager {len(tensors)}.{i}" for i in range(len(tensors))]
    return lambda: reduced(tensors, names, True)


def traced(arrays: Sequence[np.ndarray[Any, Any]]) -> Callable[[], list[Any]]:
    """Return a `tf.function` that only sums *arrays*."""
    tensors = [tf.constant(array) for array in arrays]
    names = [f"tensorflow function {len(tensors)}.{i}" for i in range(len(tensors))]
    program = tf.function(lambda tensors: reduced(tensors, names, True), autograph=False)
    return lambda: list(program(tensors))


ROWS = {"tf eager": eager, "tf function": traced}
