"""Sums of Keras's tensors on JAX, inside and outside jit, as one push_pull of `bpsfast.jax`."""
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
    """Return the wire name of *tensor*'s dtype; raises `UnsupportedError` if it is not summed."""
    return wire_name(tensor.dtype)


def is_symbolic(tensor: Any) -> bool:
    """See `backend.TensorBackend`."""
    return isinstance(tensor, jax.core.Tracer)


def reduced(chosen: GradientSet, tensors: Sequence[Any], learning_rate: Callable[[], Any]) -> list[Any]:
    """Return the sums (means) of *tensors*; raises as `bpsfast.jax.push_pull`. *learning_rate* is an array of the
    program and is not used.
    """
    call = _calls.get(chosen)
    if call is None:
        leaves = (Leaf(name, *kind, codec) for name, kind, codec in zip(chosen.wire_names, chosen.kinds, chosen.codecs))
        call = _calls.setdefault(chosen, PushPullCall(tuple(leaves), chosen.average, None))
    return summed(call, tensors)


def reduced_if(condition: Any, chosen: GradientSet, tensors: Sequence[Any],
               learning_rate: Callable[[], Any]) -> list[Any]:
    """As `reduced`, if *condition* is true; else return *tensors*."""
    if not is_symbolic(condition):
        return reduced(chosen, tensors, learning_rate) if condition else list(tensors)
    found: list[Any] = jax.lax.cond(condition, lambda: reduced(chosen, tensors, learning_rate), lambda: list(tensors))
    return found
