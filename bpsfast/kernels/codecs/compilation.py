"""Compiles the codec kernels as numba cfuncs."""
from __future__ import annotations

import functools
from pathlib import Path
from types import FunctionType
from typing import Any

from numba import cfunc, types

from bpsfast import kernels
from bpsfast.kernels import element_ir, sum_ir
from bpsfast.kernels.codecs import dithering, error_feedback, low_precision, onebit, sparse_pairs
from bpsfast.kernels.codecs.elements import pointer_to

_FUNCTIONS = {
    "encode_onebit": onebit.encode,
    "decode_onebit": onebit.decode,
    "encode_topk": sparse_pairs.encode_largest,
    "decode_topk": sparse_pairs.decode_largest,
    "encode_randomk": sparse_pairs.encode_drawn,
    "decode_randomk": sparse_pairs.decode_drawn,
    "encode_dithering": dithering.encode,
    "decode_dithering": dithering.decode,
    "encode_float16": low_precision.encode_float16,
    "decode_float16": low_precision.decode_float16,
    "encode_bfloat16": low_precision.encode_bfloat16,
    "decode_bfloat16": low_precision.decode_bfloat16,
    "encode_int8": low_precision.encode_int8,
    "decode_int8": low_precision.decode_int8,
    "feed": error_feedback.feed,
    "divide": error_feedback.divide,
    "narrow": error_feedback.narrow,
}


def compile_kernel(name: str, dtype: str, wide: str) -> Any:
    """Compile the kernel *name* for tensors of *dtype*, compressed as *wide*; return numba's cfunc, the code's owner.

    The machine code is read from and saved to numba's disk cache if it can be used.
    """
    compiles = functools.partial(cfunc, _signature(name, dtype, wide), error_model="numpy")
    return kernels.with_cache(__file__, lambda cache: compiles(cache=cache)(
        _named(name, dtype, f"_{_fingerprint()}" if cache else "")))


def _named(name: str, dtype: str, end: str) -> Any:
    """Return a copy of the function with its own name, from which numba derives the name of its cache file."""
    original = _FUNCTIONS[name]
    copy = FunctionType(original.__code__, original.__globals__, original.__name__)
    copy.__module__ = original.__module__
    copy.__qualname__ = f"{name}_{dtype}{end}"
    return copy


def _signature(name: str, dtype: str, wide: str) -> Any:
    i64, f64, byte = types.int64, types.float64, types.CPointer(types.uint8)
    t, d = types.CPointer(getattr(types, wide)), pointer_to(dtype)
    if name == "feed":
        return types.void(t, d, t, t, i64, f64, f64)
    if name == "divide":
        return types.void(t, i64, f64)
    if name == "narrow":
        return types.void(d, t, i64)
    if name.startswith("encode"):
        return i64(byte, i64, t, i64, t, types.CPointer(types.uint64), i64, i64, byte)
    return i64(t, i64, byte, i64, i64, i64, i64, byte)


@functools.cache
def _fingerprint() -> str:
    return sum_ir.fingerprint([*sorted(Path(__file__).parent.glob("*.py")), element_ir.__file__, sum_ir.__file__])
