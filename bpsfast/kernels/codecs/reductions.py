"""Reductions with the same bits on any CPU: sums of magnitudes and squares, the largest magnitude, comparisons.

Sums of doubles have `N_COLUMNS` columns with element i in column i mod `N_COLUMNS`; columns are then added in order.
Magnitudes are compared by their bits, which order as the magnitudes do, with NaN above all.
"""
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bpsfast.kernels.codecs.elements import Elements, wide_name
from bpsfast.kernels.codecs.intrinsics import helper, nbytes_of as width_of
from bpsfast.kernels.element_ir import F64, I64, constant, emits, nbytes_of, shape

#: Enough for the adders of the widest vectors; part of the arithmetic (`codec_reference`).
N_COLUMNS = 32


@intrinsic
def sum_of_squares(typing, x, n):  # type: ignore[no-untyped-def]
    """Return the sum of the squares of *n* elements of T at *x*."""
    return emits(types.float64(x, n), lambda b, *args: ColumnSum(b, wide_name(x), squares=True).of(*args))


class ColumnSum:
    """Emits IR for a sum of magnitudes, or of squares, in columns."""

    def __init__(self, builder: ir.IRBuilder, wide: str, squares: bool = False) -> None:
        self.b = builder
        self.elements = Elements(builder, wide)
        self.wide = wide
        self.squares = squares
        kind = shape(F64, N_COLUMNS)
        self.whole = cgutils.alloca_once(builder, kind)  # always used as a whole, so LLVM keeps it in registers
        self.memory = cgutils.alloca_once(builder, kind)
        builder.store(constant(F64, 0.0, N_COLUMNS), self.whole)

    def of(self, x: ir.Value, n: ir.Value) -> ir.Value:
        """Emit the sum of *n* elements at *x*."""
        whole = self.b.and_(n, I64(-N_COLUMNS))
        with cgutils.for_range_slice(self.b, I64(0), whole, I64(N_COLUMNS), I64) as (index, _):
            self.add(self.elements.load(x, self.wide, index, N_COLUMNS))
        self.begin_rest()
        with cgutils.for_range_slice(self.b, whole, n, I64(1), I64) as (index, _):
            self.add_one(self.elements.load(x, self.wide, index, 1), index)
        return self.total()

    def add(self, values: ir.Value) -> None:
        """Add `N_COLUMNS` elements."""
        self.b.store(self.b.fadd(self.b.load(self.whole), self._term(values)), self.whole)

    def begin_rest(self) -> None:
        """Switch to single elements."""
        self.b.store(self.b.load(self.whole), self.memory)

    def add_one(self, value: ir.Value, index: ir.Value) -> None:
        """Add the element with this *index*."""
        columns = self.b.bitcast(self.memory, F64.as_pointer())
        column = self.b.gep(columns, [self.b.and_(index, I64(N_COLUMNS - 1))])
        self.b.store(self.b.fadd(self.b.load(column), self._term(value)), column)

    def total(self) -> ir.Value:
        """Add up the columns."""
        columns = self.b.bitcast(self.memory, F64.as_pointer())
        total: ir.Value = F64(0.0)
        for column in range(N_COLUMNS):
            total = self.b.fadd(total, self.b.load(self.b.gep(columns, [I64(column)])))
        return total

    def _term(self, values: ir.Value) -> ir.Value:
        n_items = getattr(values.type, "count", 1)
        doubles = values if self.wide == "float64" else self.b.fpext(values, shape(F64, n_items))
        return self.b.fmul(doubles, doubles) if self.squares else self.elements.magnitude(doubles)


#: The number of elements that `reaching` compares.
N_TOGETHER = 64


@helper
def magnitude(bits, i):  # type: ignore[no-untyped-def]
    """Return the bits of |x| for element *i* of *bits*; the same number for every NaN."""
    if width_of(bits) == 4:
        return min(np.uint64(bits[i]) & np.uint64(0x7FFFFFFF), np.uint64(0x7F800001))
    return min(np.uint64(bits[i]) & np.uint64(0x7FFFFFFFFFFFFFFF), np.uint64(0x7FF0000000000001))


@intrinsic
def largest(typing, x, n):  # type: ignore[no-untyped-def]
    """Return the largest of *n* magnitudes at *x*: NaN if one is NaN, 0 if n is 0."""
    wide = wide_name(x)

    def emit(builder: ir.IRBuilder, x: ir.Value, n: ir.Value) -> ir.Value:
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

    return emits(x.dtype(x, n), emit)


def _larger(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_unsigned(">", left, right), left, right)


@intrinsic
def reaching(typing, x, index, bound):  # type: ignore[no-untyped-def]
    """Return a word with a bit, the lowest first, for each of `N_TOGETHER` elements from x[*index*].

    It is 1 if the bits of the element's magnitude are at least *bound*, the bits of a number.
    """
    wide = wide_name(x)

    def emit(builder: ir.IRBuilder, x: ir.Value, index: ir.Value, bound: ir.Value) -> ir.Value:
        elements = Elements(builder, wide)
        values = elements.magnitude(elements.load(x, wide, index, N_TOGETHER))
        word = bound if wide == "float64" else builder.trunc(bound, ir.IntType(32))
        least = elements.splat(builder.bitcast(word, elements.wide), N_TOGETHER)
        return builder.bitcast(builder.fcmp_unordered(">=", values, least), I64)

    return emits(types.uint64(x, index, bound), emit)
