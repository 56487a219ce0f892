"""Benchmark inputs with known sums: element i of rank r is i mod 251 + r, exact in float32 up to thousands of ranks."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bpsfast.bench.harness.contestant import Operation

Array = np.ndarray[Any, Any]
_PERIOD = 251


def fill(array: Array, rank: int, known: bool) -> None:
    """Write *rank*'s inputs if *known*; else zeros, which stay zeros in repeated sums in place."""
    array[:] = 0
    if known:
        array += _ramp(array)
        array += array.dtype.type(rank)


def n_wrong(result: Array, size: int) -> int:
    """Count the elements of *result* that are not the sum over *size* ranks."""
    expected = _ramp(result) * result.dtype.type(size) + result.dtype.type(size * (size - 1) // 2)
    return int(np.count_nonzero(result != expected))


def operation(run: Callable[[], object], array: Array, rank: int, size: int) -> Operation:
    """Return the operation whose *run* sums *array* in place over *size* ranks."""
    return Operation(run, lambda known: fill(array, rank, known), lambda: n_wrong(array, size))


def _ramp(array: Array) -> Array:
    ramp = np.arange(_PERIOD, dtype=array.dtype)
    return np.resize(ramp, array.size).reshape(array.shape)
