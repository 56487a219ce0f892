"""The codec "onebit": the signs of a partition, and one scale. Format: `codec_reference`.

The loops are LLVM IR (`elements`): one comparison makes a word of signs, and one word selects as many elements.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bpsfast.kernels.codecs.elements import Elements, wide_name
from bpsfast.kernels.codecs.intrinsics import floats_at, is_null, nbytes_of, quiet
from bpsfast.kernels.codecs.reductions import N_COLUMNS, ColumnSum, largest
from bpsfast.kernels.element_ir import I64, constant, emit_both, emits, shape
from bpsfast.orchestration.codec import SCALED


def encode(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; uses neither *generator* nor *scratch*."""
    width = 8 * nbytes_of(x)
    words_nbytes = (n + width - 1) // width * nbytes_of(x)
    if words_nbytes + 4 > room_nbytes:
        return -1
    total = _write_signs(wire, x, n)
    if flags & SCALED:
        scale = np.float32(total / np.float64(max(1, n)))
    else:
        scale = np.float32(1.0) if largest(x, n) < math.inf else np.float32(total)
    floats_at(wire, words_nbytes)[0] = quiet(scale)
    if not is_null(error):
        _write_error(error, x, n, scale)
    return words_nbytes + 4


def decode(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; uses no *scratch*."""
    width = 8 * nbytes_of(out)
    words_nbytes = (n + width - 1) // width * nbytes_of(out)
    if nbytes != words_nbytes + 4:
        return -1
    scale = floats_at(wire, words_nbytes)[0]
    _spread(out, n, wire, np.float32(quiet(scale)), np.float32(quiet(-scale)), add)
    return 0


@intrinsic
def _write_signs(typing, wire, x, n):  # type: ignore[no-untyped-def]
    """Write the words of signs; return the sum of the magnitudes."""
    return emits(types.float64(wire, x, n), lambda b, *args: OnebitLoops(b, wide_name(x)).write(*args))


@intrinsic
def _write_error(typing, error, x, n, scale):  # type: ignore[no-untyped-def]
    """Write the error that the signs and *scale* leave of each element."""
    return emits(types.void(error, x, n, scale), lambda b, *args: OnebitLoops(b, wide_name(x)).write_error(*args))


@intrinsic
def _spread(typing, out, n, wire, above, below, add):  # type: ignore[no-untyped-def]
    """Write *above* where the sign is 0 and *below* where it is 1, or add them."""
    return emits(types.void(out, n, wire, above, below, add),
                 lambda b, *args: OnebitLoops(b, wide_name(out)).spread(*args))


class OnebitLoops:
    """Emits the loops over the elements; T is *wide*."""

    def __init__(self, builder: ir.IRBuilder, wide: str) -> None:
        self.b = builder
        self.wide = wide
        self.elements = Elements(builder, wide)
        self.width = 64 if wide == "float64" else 32
        self.word = ir.IntType(self.width)

    def write(self, wire: ir.Value, x: ir.Value, n: ir.Value) -> ir.Value:
        """Emit the words of *n* elements; return the sum of their magnitudes."""
        b, width = self.b, self.width
        words = b.bitcast(wire, self.word.as_pointer())
        sums = ColumnSum(b, self.wide)
        whole = b.and_(n, I64(-width))
        with cgutils.for_range_slice(b, I64(0), whole, I64(width), I64) as (index, _):
            parts = [self.elements.load(x, self.wide, b.add(index, I64(part)), N_COLUMNS)
                     for part in range(0, width, N_COLUMNS)]
            for part in parts:
                sums.add(part)
            b.store(self._signs(parts), b.gep(words, [b.sdiv(index, I64(width))]))
        sums.begin_rest()
        rest = cgutils.alloca_once_value(b, self.word(0))
        with cgutils.for_range_slice(b, whole, n, I64(1), I64) as (index, _):
            value = self.elements.load(x, self.wide, index, 1)
            sums.add_one(value, index)
            sign = b.zext(b.fcmp_ordered("<", value, value.type(0.0)), self.word)
            place = b.sub(I64(width - 1), b.sub(index, whole))
            b.store(b.or_(b.load(rest), b.shl(sign, self._as_word(place))), rest)
        with b.if_then(b.icmp_signed("<", whole, n)):
            b.store(b.load(rest), b.gep(words, [b.sdiv(whole, I64(width))]))
        return sums.total()

    def write_error(self, error: ir.Value, x: ir.Value, n: ir.Value, scale: ir.Value) -> None:
        """Emit ``x - (below 0 ? -scale : scale)`` of each element."""
        b, elements = self.b, self.elements
        scale = self._widen(scale)

        def emit(index: Any, n_items: int) -> None:
            value = elements.load(x, self.wide, index, n_items)
            is_below = b.fcmp_ordered("<", value, constant(elements.wide, 0.0, n_items))
            decoded = b.select(is_below, elements.splat(b.fneg(scale), n_items), elements.splat(scale, n_items))
            elements.store(elements.finite(b.fsub(value, decoded), n_items), error, self.wide, index, n_items)

        elements.each(n, emit)

    def spread(self, out: ir.Value, n: ir.Value, wire: ir.Value, above: ir.Value, below: ir.Value,
               add: ir.Value) -> None:
        """Emit both loops: with and without adding."""
        emit_both(self.b, cgutils.is_not_null(self.b, add),
                  lambda adds: self._spread(out, n, wire, self._widen(above), self._widen(below), adds))

    def _spread(self, out: ir.Value, n: ir.Value, wire: ir.Value, above: ir.Value, below: ir.Value,
                adds: bool) -> None:
        b, width, elements = self.b, self.width, self.elements
        words = b.bitcast(wire, self.word.as_pointer())
        whole = b.and_(n, I64(-width))

        def put(signs: Any, index: Any, n_items: int) -> None:
            value = b.select(signs, elements.splat(below, n_items), elements.splat(above, n_items))
            if adds:
                value = b.fadd(elements.load(out, self.wide, index, n_items), value)
            elements.store(value, out, self.wide, index, n_items)

        with cgutils.for_range_slice(b, I64(0), whole, I64(width), I64) as (index, _):
            word = b.load(b.gep(words, [b.sdiv(index, I64(width))]))
            put(b.bitcast(b.bitreverse(word), shape(ir.IntType(1), width)), index, width)
        with cgutils.for_range_slice(b, whole, n, I64(1), I64) as (index, _):
            word = b.load(b.gep(words, [b.sdiv(whole, I64(width))]))
            place = b.sub(I64(width - 1), b.sub(index, whole))
            put(b.trunc(b.lshr(word, self._as_word(place)), ir.IntType(1)), index, 1)

    def _signs(self, parts: list[ir.Value]) -> ir.Value:
        """Return the word of *parts*, in order; their first element's sign is its highest bit."""
        b = self.b
        word = self.word(0)
        for i, part in enumerate(parts):
            signs = b.fcmp_ordered("<", part, constant(self.elements.wide, 0.0, N_COLUMNS))
            bits = b.zext(b.bitcast(signs, ir.IntType(N_COLUMNS)), self.word)
            word = b.or_(word, b.shl(bits, self.word(i * N_COLUMNS)))
        return b.bitreverse(word)

    def _widen(self, scale: ir.Value) -> ir.Value:
        return scale if scale.type == self.elements.wide else self.b.fpext(scale, self.elements.wide)

    def _as_word(self, place: ir.Value) -> ir.Value:
        return place if place.type == self.word else self.b.trunc(place, self.word)
