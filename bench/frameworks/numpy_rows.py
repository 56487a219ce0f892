"""The baseline rows of `bench frameworks`: NumPy arrays, each pushed as a tensor of its own, all at once."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import bpsfast

Array = np.ndarray[Any, Any]


def new_results(arrays: Sequence[Array]) -> Callable[[], list[Any]]:
    """Return a function that sums *arrays* into new ones, as frameworks do: the baseline."""

    def run() -> list[Any]:
        handles = [bpsfast.push_pull_async(array, name=f"numpy {len(arrays)}.{i}") for i, array in enumerate(arrays)]
        return [bpsfast.synchronize(handle) for handle in handles]

    return run


def same_results(arrays: Sequence[Array]) -> Callable[[], list[Any]]:
    """Return a function that sums *arrays* into existing memory, which only NumPy's rows do."""
    outputs = [np.empty_like(array) for array in arrays]

    def run() -> list[Any]:
        handles = [bpsfast.push_pull_async(array, name=f"numpy out {len(arrays)}.{i}", out=output)
                   for i, (array, output) in enumerate(zip(arrays, outputs))]
        return [bpsfast.synchronize(handle) for handle in handles]

    return run


ROWS = {"numpy": new_results, "numpy, out=": same_results}
