"""Emits the arithmetic of one element type as LLVM IR: widen, combine, divide and round vectors or single elements.

All methods take and return LLVM values of *n_items* elements (1: plain scalars). No fastmath flag is set, and no
product is ever added to anything, so LLVM may contract nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

# name -> (type in memory; float16 as integers, because LLVM drops "non-temporal" from half vectors,
#          type of the accumulator, type integers are divided in: exact for every quotient)
_TYPES = {
    "float32": (F32, F32, F32),
    "float64": (F64, F64, F64),
    "float16": (I16, F32, F32),
    "bfloat16": (I16, F32, F32),
    "int8": (ir.IntType(8), ir.IntType(8), F32),
    "uint8": (ir.IntType(8), ir.IntType(8), F32),
    "int16": (I16, I16, F32),
    "int32": (I32, I32, F64),
    "int64": (I64, I64, I64),
}
_QUIET_NAN = {F32: (I32, 0x7FC00000), F64: (I64, 0x7FF8000000000000)}
_NBYTES = {F32: 4, F64: 8}


def nbytes_of(element: ir.Type) -> int:
    """Return the size of a scalar type."""
    return int(element.width) // 8 if isinstance(element, ir.IntType) else _NBYTES[element]


def shape(element: ir.Type, n_items: int) -> ir.Type:
    """Return the type of *n_items* elements."""
    return element if n_items == 1 else ir.VectorType(element, n_items)


def constant(element: ir.Type, value: float, n_items: int) -> ir.Constant:
    """Return *value* in every item."""
    return ir.Constant(shape(element, n_items), value if n_items == 1 else [value] * n_items)


def emits(signature: Any, emit: Callable[..., ir.Value | None]) -> tuple[Any, Any]:
    """Return what an intrinsic has to: its *signature*, and what emits its code by emit(builder, *arguments)."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        value = emit(builder, *args)
        return context.get_dummy_value() if value is None else value

    return signature, codegen


def emit_both(builder: ir.IRBuilder, condition: ir.Value, emit: Callable[[bool], None]) -> None:
    """Emit emit(True) for calls in which *condition* holds, and emit(False) for the others."""
    with builder.if_else(condition) as (then, otherwise):
        for branch, holds in ((then, True), (otherwise, False)):
            with branch:
                emit(holds)


def call_float(builder: ir.IRBuilder, name: str, value: ir.Value) -> ir.Value:
    """Call LLVM's intrinsic *name* ("fabs", "floor", "rint") on a float, or a vector of floats."""
    kind = value.type
    count = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    full_name = f"llvm.{name}.{count}f{8 * nbytes_of(getattr(kind, 'element', kind))}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), full_name)
    return builder.call(function, [value])


class Element:
    """Emit the arithmetic of the wire dtype *name* at the builder's position; inputs are combined by *op*.

    The least and the greatest of numbers and a NaN is NaN, as torch and NumPy have it.
    """

    def __init__(self, builder: ir.IRBuilder, name: str, triple: str, features: str, op: str = "sum") -> None:
        self.b = builder
        self.name = name
        self.op = op
        self.wire, self.wide, self.quotient = _TYPES[name]
        self.is_float = self.wide in _NBYTES
        self.is_half = name in ("float16", "bfloat16")
        # Without the instruction LLVM calls a library routine that is not there: the process would abort.
        self.has_half = not triple.startswith(("x86", "i686")) or "+f16c" in features

    def identity(self, n_items: int) -> ir.Constant:
        """Return what changes nothing when combined, bit for bit: of sums -0.0 (0.0 would turn -0.0 into 0.0), or 0."""
        if self.is_float:
            value = {"sum": -0.0, "product": 1.0, "min": math.inf, "max": -math.inf}[self.op]
        else:
            ones = (1 << self.wide.width) - 1
            is_signed = self.name != "uint8"
            least, greatest = (ones // 2 + 1, ones // 2) if is_signed else (0, ones)
            value = {"sum": 0, "product": 1, "min": greatest, "max": least, "band": ones, "bor": 0, "bxor": 0}[self.op]
        return constant(self.wide, value, n_items)

    def combine(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Combine accumulators; integers wrap."""
        b = self.b
        if self.op in ("min", "max"):
            return self._extreme(left, right)
        if self.is_float:
            return b.fadd(left, right) if self.op == "sum" else b.fmul(left, right)
        emit = {"sum": b.add, "product": b.mul, "band": b.and_, "bor": b.or_, "bxor": b.xor}[self.op]
        return emit(left, right)

    def _extreme(self, left: ir.Value, right: ir.Value) -> ir.Value:
        b = self.b
        sign = "<" if self.op == "min" else ">"
        if not self.is_float:
            compare = b.icmp_unsigned if self.name == "uint8" else b.icmp_signed
            return b.select(compare(sign, left, right), left, right)
        ordered = b.select(b.fcmp_ordered(sign, left, right), left, right)  # the right one if it is NaN
        return b.select(b.fcmp_unordered("uno", left, left), left, ordered)

    def widen(self, value: ir.Value, n_items: int) -> ir.Value:
        """Turn wire elements into accumulator elements (exact).

        A bfloat16 is the upper half of an f32. Vectors of them are widened in pairs, as 32-bit words, which needs
        no shuffle: first all elements with even index, then all with odd index. `narrow` puts them back.
        """
        b = self.b
        if self.name == "float16" and self.has_half:
            return b.fpext(b.bitcast(value, shape(HALF, n_items)), shape(F32, n_items))
        if self.name == "float16":
            return self._widen_half(value, n_items)
        if self.name != "bfloat16":
            return value
        if n_items == 1:
            return self.widen_in_order(value, 1)
        words = b.bitcast(value, shape(I32, n_items // 2))
        even = b.shl(words, constant(I32, 16, n_items // 2))
        odd = b.and_(words, constant(I32, 0xFFFF0000, n_items // 2))
        return b.bitcast(b.shuffle_vector(even, odd, _indices(range(n_items))), shape(F32, n_items))

    def widen_in_order(self, value: ir.Value, n_items: int) -> ir.Value:
        """Turn wire elements into accumulator elements (exact) that stay where they are."""
        b = self.b
        if self.name != "bfloat16":
            return self.widen(value, n_items)
        word = b.zext(value, shape(I32, n_items))
        return b.bitcast(b.shl(word, constant(I32, 16, n_items)), shape(F32, n_items))

    def narrow(self, value: ir.Value, n_items: int) -> ir.Value:
        """Round accumulator elements to the wire dtype, to nearest even; subnormals stay, NaN of halves is quiet."""
        b = self.b
        if self.name == "float16":
            convert = self._narrow_half if not self.has_half else self._truncate_half
            bits = convert(value, n_items)
            magnitude = b.and_(bits, constant(I16, 0x7FFF, n_items))
            is_nan = b.icmp_signed(">", magnitude, constant(I16, 0x7C00, n_items))
            return b.select(is_nan, constant(I16, 0x7E00, n_items), bits)
        if self.name != "bfloat16":
            return value
        if n_items == 1:
            return self.finish_in_order(value, 1)
        half = n_items // 2
        even, odd = (self._round_bfloat16(b.shuffle_vector(value, value, _indices(part)), half)
                     for part in (range(half), range(half, n_items)))
        words = b.or_(b.lshr(even, constant(I32, 16, half)), b.and_(odd, constant(I32, 0xFFFF0000, half)))
        return b.bitcast(words, shape(I16, n_items))

    def finish(self, value: ir.Value, n_items: int) -> ir.Value:
        """Narrow, with every NaN made the quiet one: its bits must not depend on which operand came first."""
        if not self.is_float or self.is_half:  # for the halves narrow() does it
            return self.narrow(value, n_items)
        integer, bits = _QUIET_NAN[self.wide]
        quiet = self.b.bitcast(constant(integer, bits, n_items), value.type)
        return self.b.select(self.b.fcmp_unordered("uno", value, value), quiet, value)

    def finish_in_order(self, value: ir.Value, n_items: int) -> ir.Value:
        """Do as `finish`, to elements as `widen_in_order` gives them."""
        b = self.b
        if self.name != "bfloat16":
            return self.finish(value, n_items)
        word = b.lshr(self._round_bfloat16(value, n_items), constant(I32, 16, n_items))
        return b.trunc(word, shape(I16, n_items))

    def divide(self, value: ir.Value, divisor: ir.Value, n_items: int) -> ir.Value:
        """Divide accumulators by the i64 *divisor*: truly for floats, by floor for integers.

        Up to 32 bits the floor goes by floating point (vectors have no integer division), and is exact: a / d is
        either whole or at least 1/d away from a whole number, more than rounding moves it while |a| < 2^24
        (8 and 16 bits in f32) or 2^53 (32 bits in f64).
        """
        b = self.b
        if self.is_float:
            return b.fdiv(value, self.splat(b.sitofp(divisor, self.wide), n_items))
        if self.quotient is I64:
            divisors = self.splat(divisor, n_items)
            below = b.icmp_signed("<", b.srem(value, divisors), constant(I64, 0, n_items))
            return b.add(b.sdiv(value, divisors), b.sext(below, value.type))
        unsigned = self.name == "uint8"
        floating = shape(self.quotient, n_items)
        dividend = b.uitofp(value, floating) if unsigned else b.sitofp(value, floating)
        ratio = b.fdiv(dividend, self.splat(b.sitofp(divisor, self.quotient), n_items))
        whole = call_float(b, "floor", ratio)
        return b.fptoui(whole, value.type) if unsigned else b.fptosi(whole, value.type)

    def splat(self, scalar: ir.Value, n_items: int) -> ir.Value:
        """Return *scalar* in every item."""
        if n_items == 1:
            return scalar
        empty = ir.Constant(shape(scalar.type, n_items), ir.Undefined)
        return self.b.shuffle_vector(self.b.insert_element(empty, scalar, I32(0)), empty, constant(I32, 0, n_items))

    def _round_bfloat16(self, value: ir.Value, n_items: int) -> ir.Value:
        """Return f32 bits whose upper half is the rounded bfloat16; the lower half is noise.

        In integers, because the hardware's conversion (vcvtneps2bf16) flushes subnormals.
        """
        b = self.b
        bits = b.bitcast(value, shape(I32, n_items))
        last = b.and_(b.lshr(bits, constant(I32, 16, n_items)), constant(I32, 1, n_items))
        rounded = b.add(bits, b.add(last, constant(I32, 0x7FFF, n_items)))
        return b.select(b.fcmp_unordered("uno", value, value), constant(I32, 0x7FC00000, n_items), rounded)

    def _truncate_half(self, value: ir.Value, n_items: int) -> ir.Value:
        return self.b.bitcast(self.b.fptrunc(value, shape(HALF, n_items)), shape(I16, n_items))

    def _widen_half(self, value: ir.Value, n_items: int) -> ir.Value:
        """Widen float16 bits without the instruction: shift into place, then correct the exponent's bias."""
        b, i32 = self.b, partial(constant, I32, n_items=n_items)
        word = b.zext(value, shape(I32, n_items))
        magnitude = b.and_(word, i32(0x7FFF))
        shifted = b.bitcast(b.shl(magnitude, i32(13)), shape(F32, n_items))
        scaled = b.bitcast(b.fmul(shifted, constant(F32, 2.0**112, n_items)), shape(I32, n_items))
        special = b.or_(scaled, i32(0x7F800000))
        chosen = b.select(b.icmp_signed(">=", magnitude, i32(0x7C00)), special, scaled)
        sign = b.shl(b.and_(word, i32(0x8000)), i32(16))
        return b.bitcast(b.or_(chosen, sign), shape(F32, n_items))

    def _narrow_half(self, value: ir.Value, n_items: int) -> ir.Value:
        """Round to float16 bits without the instruction, to nearest even; subnormals by the adder's own rounding."""
        b, i32 = self.b, partial(constant, I32, n_items=n_items)
        bits = b.bitcast(value, shape(I32, n_items))
        magnitude = b.and_(bits, i32(0x7FFFFFFF))
        last = b.and_(b.lshr(magnitude, i32(13)), i32(1))
        normal = b.lshr(b.add(b.sub(magnitude, i32((127 - 15) << 23)), b.add(last, i32(0x0FFF))), i32(13))
        # the last place of f32 near 0.5 is 2^-24, that of the float16 subnormals
        moved = b.fadd(b.bitcast(magnitude, shape(F32, n_items)), constant(F32, 0.5, n_items))
        subnormal = b.sub(b.bitcast(moved, shape(I32, n_items)), i32(0x3F000000))
        chosen = b.select(b.icmp_signed("<", magnitude, i32((127 - 14) << 23)), subnormal, normal)
        chosen = b.select(b.icmp_signed(">=", magnitude, i32((127 + 16) << 23)), i32(0x7C00), chosen)
        chosen = b.select(b.icmp_signed(">", magnitude, i32(0x7F800000)), i32(0x7E00), chosen)
        sign = b.and_(b.lshr(bits, i32(16)), i32(0x8000))
        return b.trunc(b.or_(chosen, sign), shape(I16, n_items))


def _indices(indices: Any) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
