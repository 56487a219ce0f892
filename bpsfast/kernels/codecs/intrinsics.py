"""Functions for numba kernels: typed views of pointers, NULL tests, bit counts, NaN handling and random draws.

Random draws are xorshift128+ with a state of two words; `codec_reference.Generator` describes them.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from bpsfast.kernels.element_ir import I64, emits

_WORDS = {32: types.uint32, 64: types.uint64}


@intrinsic
def is_null(typing, pointer):  # type: ignore[no-untyped-def]
    """Return whether *pointer* is NULL."""
    return emits(types.boolean(pointer), lambda b, pointer: b.icmp_unsigned("==", b.ptrtoint(pointer, I64), I64(0)))


@intrinsic
def words_at(typing, pointer, nbytes, like):  # type: ignore[no-untyped-def]
    """Return a pointer to unsigned integers as wide as the elements of *like*, *nbytes* after *pointer*."""
    return _view(types.CPointer(_WORDS[like.dtype.bitwidth]), pointer, nbytes, like)


@intrinsic
def values_at(typing, pointer, nbytes, like):  # type: ignore[no-untyped-def]
    """Return a pointer of *like*'s type, *nbytes* after *pointer*."""
    return _view(like, pointer, nbytes, like)


def _view(result: Any, pointer: Any, nbytes: Any, *rest: Any) -> tuple[Any, Any]:
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        first = builder.bitcast(args[0], ir.IntType(8).as_pointer())
        return builder.bitcast(builder.gep(first, [args[1]]), context.get_value_type(result))

    return result(pointer, nbytes, *rest), codegen


def _viewer(element: Any) -> Any:
    @intrinsic
    def at(typing, pointer, nbytes):  # type: ignore[no-untyped-def]
        """Return a pointer to elements of one type, *nbytes* after *pointer*."""
        return _view(types.CPointer(element), pointer, nbytes)

    return at


#: Called with a pointer and a number of bytes, they return a typed pointer that many bytes after it.
bytes_at, units_at, counters_at, floats_at = map(_viewer, (types.uint8, types.uint32, types.uint64, types.float32))


@intrinsic
def nbytes_of(typing, pointer):  # type: ignore[no-untyped-def]
    """Return the size in bytes of an element of *pointer*."""
    return emits(types.int64(pointer), lambda b, _: I64(pointer.dtype.bitwidth // 8))


@intrinsic
def leading_zeros(typing, word):  # type: ignore[no-untyped-def]
    """Return the number of leading zeros of the 64-bit *word*; 64 for 0."""
    return emits(types.int64(types.uint64), lambda b, word: b.ctlz(word, ir.IntType(1)(0)))


@intrinsic
def trailing_zeros(typing, word):  # type: ignore[no-untyped-def]
    """Return the number of trailing zeros of the 64-bit *word*; 64 for 0."""
    return emits(types.int64(types.uint64), lambda b, word: b.cttz(word, ir.IntType(1)(0)))


#: Decorates functions that kernels call. They have no entry for Python, which halves the time to compile them, and no
#: error for a division by zero.
helper = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]


@helper
def quiet(value):  # type: ignore[no-untyped-def]
    """Return *value*, or the quiet NaN for any NaN."""
    return value if value == value else math.nan


@helper
def finite(value):  # type: ignore[no-untyped-def]
    """Return *value*, or 0 if it is NaN or infinite."""
    return value if abs(value) < math.inf else 0.0


@helper
def following(a, b):  # type: ignore[no-untyped-def]
    """Return the state after (*a*, *b*); the drawn 64 bits are the sum of its words."""
    a ^= a << np.uint64(23)
    a ^= a >> np.uint64(17)
    return b, a ^ b ^ (b >> np.uint64(26))


@helper
def is_below(drawn, chance):  # type: ignore[no-untyped-def]
    """Return whether the random 64 bits *drawn* are below *chance*, which makes it true with that probability."""
    return np.float64(drawn) < chance * 2.0**64
