"""Magnitudes by their bits, which order as the magnitudes do, with NaN above all."""
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bpsfast.kernels.codecs.elements import Elements, wide_name
from bpsfast.kernels.codecs.helper import helper
from bpsfast.kernels.codecs.intrinsics import nbytes_of as width_of
from bpsfast.kernels.element_ir import I64, constant, nbytes_of, shape

#: Elements that `reaching` looks at.
N_TOGETHER = 64


@helper
def magnitude(bits, i):  # type: ignore[no-untyped-def]
    """Return the bits of |x| of element *i* of those whose bits are at *bits*; one number for every NaN."""
    if width_of(bits) == 4:
        return min(np.uint64(bits[i]) & np.uint64(0x7FFFFFFF), np.uint64(0x7F800001))
    return min(np.uint64(bits[i]) & np.uint64(0x7FFFFFFFFFFFFFFF), np.uint64(0x7FF0000000000001))


@intrinsic
def largest(typing, x, n):  # type: ignore[no-untyped-def]
    """Return the largest of *n* magnitudes at *x*, NaN if one is NaN; 0 of none."""
    wide = wide_name(x)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        x, n = args
        elements = Elements(builder, wide)
        word = ir.IntType(8 * nbytes_of(elements.wide))
        kind = shape(word, N_TOGETHER)
        most = cgutils.alloca_once_value(builder, constant(word, 0, N_TOGETHER))
        last = cgutils.alloca_once_value(builder, word(0))
        whole = builder.and_(n, I64(-N_TOGETHER))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(N_TOGETHER), I64) as (index, _):
            values = elements.magnitude(elements.load(x, wide, index, N_TOGETHER))
            builder.store(_larger(builder, builder.load(most), builder.bitcast(values, kind)), most)
        with cgutils.for_range_slice(builder, whole, n, I64(1), I64) as (index, _):
            value = elements.magnitude(elements.load(x, wide, index, 1))
            builder.store(_larger(builder, builder.load(last), builder.bitcast(value, word)), last)
        name = f"llvm.vector.reduce.umax.v{N_TOGETHER}i{word.width}"
        reduce = cgutils.get_or_insert_function(builder.module, ir.FunctionType(word, [kind]), name)
        return builder.bitcast(_larger(builder, builder.call(reduce, [builder.load(most)]), builder.load(last)),
                               elements.wide)

    return x.dtype(x, n), codegen


def _larger(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_unsigned(">", left, right), left, right)


@intrinsic
def reaching(typing, x, index, bound):  # type: ignore[no-untyped-def]
    """Return which of `N_TOGETHER` elements at x[*index*] have a magnitude with bits of at least *bound*, those of a
    number: a word, its lowest bit for the first.
    """
    wide = wide_name(x)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        x, index, bound = args
        elements = Elements(builder, wide)
        values = elements.magnitude(elements.load(x, wide, index, N_TOGETHER))
        word = bound if wide == "float64" else builder.trunc(bound, ir.IntType(32))
        least = elements.splat(builder.bitcast(word, elements.wide), N_TOGETHER)
        return builder.bitcast(builder.fcmp_unordered(">=", values, least), I64)

    return types.uint64(x, index, bound), codegen
