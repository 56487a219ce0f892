"""The element types that travel and are summed: one table, one name each.

A *wire dtype* is what lies in a segment and on a wire; its *accumulator* is what additions are made in
(design: f16, bf16 and f32 accumulate in f32, f64 in f64, integers in their own width modulo 2^w).
Importing this module compiles nothing and needs no numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from bpsfast.orchestration.errors import UnsupportedError


@dataclass(frozen=True)
class WireDtype:
    """Describe one element type; *numpy* and *accumulator* are NumPy dtypes in native byte order."""

    name: str
    numpy: np.dtype[Any]
    itemsize: int
    is_float: bool
    accumulator: np.dtype[Any]


def _row(name: str, scalar: Any, accumulator: Any, is_float: bool) -> WireDtype:
    dtype = np.dtype(scalar)
    return WireDtype(name, dtype, dtype.itemsize, is_float, np.dtype(accumulator))


TABLE: dict[str, WireDtype] = {
    row.name: row
    for row in (
        _row("float32", np.float32, np.float32, True),
        _row("float64", np.float64, np.float64, True),
        _row("float16", np.float16, np.float32, True),
        _row("bfloat16", ml_dtypes.bfloat16, np.float32, True),
        _row("int8", np.int8, np.int8, False),
        _row("int16", np.int16, np.int16, False),
        _row("int32", np.int32, np.int32, False),
        _row("int64", np.int64, np.int64, False),
        _row("uint8", np.uint8, np.uint8, False),
    )
}

NAMES = tuple(TABLE)

_NAME_OF = {row.numpy: row.name for row in TABLE.values()}


def lookup(name: str) -> WireDtype:
    """Return the row of the wire dtype *name*; `UnsupportedError` lists the known names."""
    try:
        return TABLE[name]
    except KeyError:
        raise UnsupportedError(f"wire dtype {name!r} is unknown; bpsfast sums {', '.join(NAMES)}") from None


def wire_name(dtype_like: Any) -> str:
    """Return the wire name of a NumPy dtype, a scalar type, a dtype name, or an object with ``.dtype``.

    Raises `UnsupportedError` for everything else. A plain uint16 is refused, never read as bfloat16:
    view such an array as ``ml_dtypes.bfloat16`` first, if that is what its bits are.
    """
    if isinstance(dtype_like, str) and dtype_like in TABLE:
        return dtype_like
    found = dtype_like if isinstance(dtype_like, type) else getattr(dtype_like, "dtype", dtype_like)
    try:
        if found is None:  # numpy reads None as float64
            raise TypeError("None is not a dtype")
        dtype = np.dtype(found)
    except TypeError:
        raise UnsupportedError(f"{dtype_like!r} is not a dtype; bpsfast sums {', '.join(NAMES)}") from None
    name = _NAME_OF.get(dtype)
    if name is None:
        raise UnsupportedError(f"dtype {_describe(dtype)} cannot be summed; bpsfast sums {', '.join(NAMES)}")
    return name


def _describe(dtype: np.dtype[Any]) -> str:
    """Say what is wrong with *dtype* where the name alone would not."""
    if dtype == np.dtype(np.uint16):
        return "uint16 (if these are bfloat16 bits: x.view(ml_dtypes.bfloat16))"
    if not dtype.isnative:
        return f"{dtype.str!r} (byte-swapped; convert with x.astype(x.dtype.newbyteorder('=')))"
    if dtype.hasobject:
        return f"{dtype} (Python objects)"
    return str(dtype)
