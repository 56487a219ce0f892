"""Reference sums in NumPy, added in the same order as in every job: tests compare all other sums with them.

A node's partial is its ranks' inputs in local-rank order, added in the accumulator from the first term on and rounded
once to the wire dtype; the result is the partials in node order, the same way, then the average, rounded once. Integers
wrap modulo 2^w and average by floor division of the wrapped sum. NaN results are the canonical quiet NaN. Imports numpy
and ml_dtypes only, so that an error of the kernels cannot be in the oracle, too.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def reduce(groups: Sequence[Sequence[Array]], average: bool) -> Array:
    """Sum *groups* (per node, in node order, its ranks' arrays); empty groups are skipped.

    All arrays have one shape and one wire dtype; at least one group is not empty. *average* divides by the number of
    arrays. Returns a new array of that shape and dtype.
    """
    return _reduce(groups, sum(len(group) for group in groups) if average else 1)


def reduce_rows(groups: Sequence[Sequence[tuple[Array, Array]]], average: bool) -> tuple[Array, Array]:
    """Sum rows: *groups* are per node, in node order, its ranks' (indices, values), of distinct indices.

    Each row that some rank has is summed as `reduce` does, over the ranks that have it; *average* divides by the number
    of all ranks. Returns (indices, values), ascending; some rank has a row.
    """
    divisor = sum(len(group) for group in groups) if average else 1
    indices = np.unique(np.concatenate([own for group in groups for own, _ in group]))
    rows = [_reduce([[values[own == index][0] for own, values in group if index in own] for group in groups], divisor)
            for index in indices]
    return indices, np.stack(rows)


def _reduce(groups: Sequence[Sequence[Array]], divisor: int) -> Array:
    nodes = [group for group in groups if len(group)]
    wire = nodes[0][0].dtype
    wide = np.dtype(np.float32) if wire in _HALVES else wire
    with np.errstate(all="ignore"):
        partials = [_accumulate(group, wide).astype(wire) for group in nodes]
        total = _accumulate(partials, wide)
        if divisor > 1:
            # int64 holds any quotient, so a divisor above the width of int8 is no special case
            total = total.astype(np.int64) // divisor if wire.kind in "iu" else total / wide.type(divisor)
        result = np.asarray(total).astype(wire)  # division turns 0-d arrays into scalars
    if wire.kind not in "iu":
        result[np.isnan(result)] = wire.type(np.nan)
    return result


def _accumulate(terms: Sequence[Array], wide: np.dtype[Any]) -> Array:
    total = terms[0].astype(wide)  # a copy; starting from zero instead would turn -0.0 into 0.0
    for term in terms[1:]:
        total += term.astype(wide)
    return total
