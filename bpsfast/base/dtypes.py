"""The table of the dtypes that bpsfast sums, each with its name and the dtype in which it is accumulated.

A *wire dtype* is what lies in a segment and on a wire; its *accumulator* is what additions are made in: float32 for
float16, bfloat16 and float32, float64 for itself, integers in their own width w modulo 2^w. Importing this module
compiles nothing and needs no numba.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..orchestration.errors import UnsupportedError


class WireDtype(NamedTuple):
    """One dtype; *numpy* and *accumulator* are NumPy dtypes in native byte order."""

    name: str
    numpy: np.dtype[Any]
    itemsize: int
    is_float: bool
    accumulator: np.dtype[Any]


NAMES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8")
_HALVES = ("float16", "bfloat16")


def _row(name: str) -> WireDtype:
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    accumulator = np.dtype(np.float32) if name in _HALVES else dtype
    return WireDtype(name, dtype, dtype.itemsize, dtype.kind not in "iu", accumulator)


TABLE = {name: _row(name) for name in NAMES}
_NAME_OF = {row.numpy: name for name, row in TABLE.items()}


def lookup(name: str) -> WireDtype:
    """Return the row of the wire dtype *name*; `UnsupportedError` lists the known names."""
    try:
        return TABLE[name]
    except KeyError:
        raise UnsupportedError(f"wire dtype {name!r} is unknown; bpsfast sums {', '.join(NAMES)}") from None


def wire_name(dtype_like: Any) -> str:
    """Return the wire name of a NumPy dtype, a scalar type, a dtype name, or an object with ``.dtype``.

    Raises `UnsupportedError` for everything else. A plain uint16 is refused, never read as bfloat16: view such an array
    as ``ml_dtypes.bfloat16`` first, if that is what its bits are.
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
    """Return the name of *dtype*, and why it is unsupported where the name alone does not tell."""
    if dtype == np.dtype(np.uint16):
        return "uint16 (if these are bfloat16 bits: x.view(ml_dtypes.bfloat16))"
    if not dtype.isnative:
        return f"{dtype.str!r} (byte-swapped; convert with x.astype(x.dtype.newbyteorder('=')))"
    if dtype.hasobject:
        return f"{dtype} (Python objects)"
    return str(dtype)
