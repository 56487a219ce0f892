"""Compiled optimizers' updates of float32 parameters in place, which a parameter server does in addition to the sum.

They are as fast as LLVM makes them: reassociation and approximate square roots are allowed (not in our sums). Each is
one pass: every value that an update reads or writes passes memory once.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_LEARNING_RATE, _MOMENTUM, _DECAY, _EPSILON = (np.float32(value) for value in (1e-3, 0.9, 0.999, 1e-8))
_KEPT_MOMENTUM, _KEPT_DECAY = np.float32(0.1), np.float32(0.001)


class Update(NamedTuple):
    """An update of `n_arrays` (parameters, gradient, state), with `n_streams` reads and writes of them."""

    n_arrays: int
    n_streams: int
    loop: Callable[..., None]


def _sgd(w: Any, g: Any) -> None:
    for i in range(w.size):
        w[i] -= _LEARNING_RATE * g[i]


def _momentum(w: Any, g: Any, m: Any) -> None:
    for i in range(w.size):
        velocity = _MOMENTUM * m[i] + g[i]
        m[i] = velocity
        w[i] -= _LEARNING_RATE * velocity


def _rmsprop(w: Any, g: Any, v: Any) -> None:
    for i in range(w.size):
        square = _DECAY * v[i] + _KEPT_DECAY * g[i] * g[i]
        v[i] = square
        w[i] -= _LEARNING_RATE * g[i] / (np.sqrt(square) + _EPSILON)


def _adam(w: Any, g: Any, m: Any, v: Any) -> None:
    for i in range(w.size):
        mean = _MOMENTUM * m[i] + _KEPT_MOMENTUM * g[i]
        square = _DECAY * v[i] + _KEPT_DECAY * g[i] * g[i]
        m[i], v[i] = mean, square
        w[i] -= _LEARNING_RATE * mean / (np.sqrt(square) + _EPSILON)


UPDATES = {
    "SGD": Update(2, 3, _sgd),
    "momentum": Update(3, 5, _momentum),
    "RMSProp": Update(3, 5, _rmsprop),
    "Adam": Update(4, 7, _adam),
}


@functools.cache
def compiled(name: str) -> Any:
    """Return the update *name* as a function of its arrays (1-D, float32, contiguous) that releases the GIL."""
    from numba import njit, types

    update = UPDATES[name]
    signature = types.void(*[types.float32[::1]] * update.n_arrays)
    return njit(signature, nogil=True, fastmath=True, error_model="numpy")(update.loop)


def assembly(name: str) -> str:
    """Return an update's machine code as text."""
    function = compiled(name)
    return str(function.inspect_asm(function.signatures[0]))
