"""The codecs "float16", "bfloat16" and "int8": rounded elements, int8 in blocks with a scale."""
from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bpsfast.kernels.codecs.elements import Elements, wide_name
from bpsfast.kernels.codecs.intrinsics import bytes_at, finite, floats_at, helper, is_null, nbytes_of, quiet, values_at
from bpsfast.kernels.codecs.reductions import largest
from bpsfast.kernels.element_ir import call_float, constant, emit_both, emits, shape
from bpsfast.orchestration.codec import INT8_BLOCK


def encode_float16(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; uses neither *generator* nor *scratch*."""
    if 2 * n > room_nbytes:
        return -1
    _write_float16(wire, x, n, error)
    return 2 * n


def encode_bfloat16(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; uses neither *generator* nor *scratch*."""
    if 2 * n > room_nbytes:
        return -1
    _write_bfloat16(wire, x, n, error)
    return 2 * n


def decode_float16(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; uses no *scratch*."""
    if nbytes != 2 * n:
        return -1
    _read_float16(out, n, wire, add)
    return 0


def decode_bfloat16(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; uses no *scratch*."""
    if nbytes != 2 * n:
        return -1
    _read_bfloat16(out, n, wire, add)
    return 0


def _writer(name: str) -> Any:
    @intrinsic
    def write(typing, wire, x, n, error):  # type: ignore[no-untyped-def]
        wide = wide_name(x)

        def emit(builder: ir.IRBuilder, wire: ir.Value, x: ir.Value, n: ir.Value, error: ir.Value) -> None:
            elements = Elements(builder, wide)

            def put(index: ir.Value, n_items: int, keeps_error: bool) -> None:
                value = elements.load(x, wide, index, n_items)
                elements.store(value, wire, name, index, n_items)
                if keeps_error:
                    lost = builder.fsub(value, elements.load(wire, name, index, n_items))
                    elements.store(elements.finite(lost, n_items), error, wide, index, n_items)

            emit_both(builder, elements.is_given(error),
                      lambda keeps: elements.each(n, lambda index, n_items: put(index, n_items, keeps)))

        return emits(types.void(wire, x, n, error), emit)

    return write


def _reader(name: str) -> Any:
    @intrinsic
    def read(typing, out, n, wire, add):  # type: ignore[no-untyped-def]
        wide = wide_name(out)

        def emit(builder: ir.IRBuilder, out: ir.Value, n: ir.Value, wire: ir.Value, add: ir.Value) -> None:
            elements = Elements(builder, wide)

            def put(index: ir.Value, n_items: int, adds: bool) -> None:
                value = elements.load(wire, name, index, n_items)
                if adds:
                    value = builder.fadd(elements.load(out, wide, index, n_items), value)
                elements.store(value, out, wide, index, n_items)

            emit_both(builder, cgutils.is_not_null(builder, add),
                      lambda adds: elements.each(n, lambda index, n_items: put(index, n_items, adds)))

        return emits(types.void(out, n, wire, add), emit)

    return read


_write_float16, _write_bfloat16 = _writer("float16"), _writer("bfloat16")
_read_float16, _read_bfloat16 = _reader("float16"), _reader("bfloat16")


def encode_int8(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; uses neither *generator* nor *scratch*."""
    n_blocks = (n + INT8_BLOCK - 1) // INT8_BLOCK
    if 4 * n_blocks + n > room_nbytes:
        return -1
    scales = floats_at(wire, 0)
    for block in range(n_blocks):
        start = block * INT8_BLOCK
        here = values_at(x, start * nbytes_of(x), x)
        n_here = min(INT8_BLOCK, n - start)
        lost = error if is_null(error) else values_at(error, start * nbytes_of(x), x)
        numbers = bytes_at(wire, 4 * n_blocks + start)
        scale = _block_scale(here, n_here)
        scales[block] = scale
        if scale > 0:
            _quantise(numbers, here, n_here, lost, scale)
        else:
            for i in range(n_here):
                numbers[i] = 0
                if not is_null(error):
                    lost[i] = finite(here[i] - scale)
    return 4 * n_blocks + n


def decode_int8(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; uses no *scratch*."""
    n_blocks = (n + INT8_BLOCK - 1) // INT8_BLOCK
    if nbytes != 4 * n_blocks + n:
        return -1
    scales = floats_at(wire, 0)
    for block in range(n_blocks):
        scale = scales[block]
        for i in range(block * INT8_BLOCK, min(n, (block + 1) * INT8_BLOCK)):
            value = type(out[i])(np.int8(wire[4 * n_blocks + i])) * scale
            out[i] = quiet(out[i] + value) if add else quiet(value)
    return 0


@helper
def _block_scale(x, n):  # type: ignore[no-untyped-def]
    """Return the value of 1 as a float32; NaN if an element is NaN, infinite, or too large for a float32."""
    most = largest(x, n)
    scale = np.float32(most / type(most)(127))
    return scale if scale < np.float32(math.inf) else np.float32(math.nan)


@intrinsic
def _quantise(typing, numbers, x, n, error, scale):  # type: ignore[no-untyped-def]
    """Write each of *n* elements as an integer multiple of *scale*, from -127 to 127, and the error if it is kept."""
    wide = wide_name(x)
    return emits(types.void(numbers, x, n, error, scale), lambda b, *args: Int8BlockLoops(b, wide, *args).write())


class Int8BlockLoops:
    """Emits the loops over a block; *scale* is above 0 and all elements are finite."""

    def __init__(self, builder: ir.IRBuilder, wide: str, numbers: ir.Value, x: ir.Value, n: ir.Value, error: ir.Value,
                 scale: ir.Value) -> None:
        self.b = builder
        self.wide = wide
        self.elements = Elements(builder, wide)
        self.numbers, self.x, self.n, self.error = numbers, x, n, error
        self.scale = builder.fpext(scale, self.elements.wide) if wide == "float64" else scale

    def write(self) -> None:
        """Emit both loops: with and without the error."""
        emit_both(self.b, self.elements.is_given(self.error), lambda keeps: self.elements.each(
            self.n, lambda index, n_items: self._emit(index, n_items, keeps)))

    def _emit(self, index: Any, n_items: int, keeps: bool) -> None:
        b, elements = self.b, self.elements
        value = elements.load(self.x, self.wide, index, n_items)
        scale = elements.splat(self.scale, n_items)
        nearest = call_float(b, "rint", b.fdiv(value, scale))  # halves to even
        number = b.fptosi(nearest, shape(ir.IntType(32), n_items))
        for sign, limit in ((">", 127), ("<", -127)):
            most = constant(ir.IntType(32), limit, n_items)
            number = b.select(b.icmp_signed(sign, number, most), most, number)
        narrow = b.trunc(number, shape(ir.IntType(8), n_items))
        stored = b.store(narrow, b.bitcast(b.gep(self.numbers, [index]), narrow.type.as_pointer()))
        stored.align = 1
        if keeps:
            decoded = b.fmul(b.sitofp(number, value.type), scale)
            elements.store(elements.finite(b.fsub(value, decoded), n_items), self.error, self.wide, index, n_items)
