"""Sums Keras's tensors on TensorFlow, eagerly and inside `tf.function`, by `bpsfast.tensorflow`."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ..tensorflow.memory import wire_dtype
from ..tensorflow.ops import reduced as summed
from ..trainer.process import barrier as barrier, init as init, shutdown as shutdown
from .backend import GradientSet


def dtype_of(tensor: Any) -> str:
    """See `backend.TensorBackend`."""
    return wire_dtype(tensor.dtype, f"a tensor of shape {tensor.shape}")


def is_symbolic(tensor: Any) -> bool:
    """See `backend.TensorBackend`."""
    return bool(tf.is_symbolic_tensor(tensor))


def reduced(chosen: GradientSet, tensors: Sequence[Any], learning_rate: Callable[[], Any],
            condition: Any = None) -> list[Any]:
    """See `backend.TensorBackend`; raises as `bpsfast.tensorflow.ops.reduced`."""
    return summed(tensors, chosen.wire_names, chosen.average,
                  compression=dict(zip(chosen.wire_names, chosen.codecs)) if any(chosen.codecs) else None,
                  learning_rate=tf.cast(learning_rate(), tf.float32) if chosen.has_error_feedback else None)
