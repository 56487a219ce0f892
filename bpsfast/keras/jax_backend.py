"""Sums Keras's tensors on JAX, inside and outside jit, as one push_pull of `bpsfast.jax`."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..base.dtypes import wire_name
from ..jax import barrier as barrier, init as init, shutdown as shutdown
from ..jax.ops import summed
from ..jax.primitive import PushPullCall
from ..trainer.bundle import Leaf
from .backend import GradientSet

_calls: dict[GradientSet, PushPullCall] = {}


def dtype_of(tensor: Any) -> str:
    """See `backend.TensorBackend`."""
    return wire_name(tensor.dtype)


def is_symbolic(tensor: Any) -> bool:
    """See `backend.TensorBackend`."""
    return isinstance(tensor, jax.core.Tracer)


def reduced(chosen: GradientSet, tensors: Sequence[Any], learning_rate: Callable[[], Any],
            condition: Any = None) -> list[Any]:
    """See `backend.TensorBackend`; raises as `bpsfast.jax.push_pull`. *learning_rate* is not used: it returns a traced
    array, and error feedback needs a number.
    """
    call = _calls.get(chosen)
    if call is None:
        leaves = (Leaf(name, *kind, codec) for name, kind, codec in zip(chosen.wire_names, chosen.kinds, chosen.codecs))
        call = _calls.setdefault(chosen, PushPullCall(tuple(leaves), chosen.average, None))
    if condition is None:
        return summed(call, tensors)
    if not is_symbolic(condition):
        return summed(call, tensors) if condition else list(tensors)
    found: list[Any] = jax.lax.cond(condition, lambda: summed(call, tensors), lambda: list(tensors))
    return found
