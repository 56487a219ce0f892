"""Emits LLVM IR that loads, converts and stores elements in vectors, for the codec kernels.

It is IR instead of a numba loop for the reasons given in `bpsfast.kernels.sum_ir`, and because outputs may be inputs
(error feedback), for which LLVM does not vectorize loops.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from bpsfast.kernels import sum_ir
from bpsfast.kernels.element_ir import F32, F64, I64, Element, call_float, constant, nbytes_of, shape

#: Vectors in one iteration of an element loop.
_N_VECTORS = 2


def pointer_to(name: str) -> types.CPointer:
    """Return numba's type of a pointer to elements of the wire dtype *name*; numba itself cannot load them."""
    return types.CPointer(types.Opaque(f"bpsfast.{name}"))


def name_of(pointer: types.CPointer) -> str:
    """Return the wire dtype of a `pointer_to` or of a pointer to floats."""
    return pointer.dtype.name.removeprefix("bpsfast.")


class Elements:
    """Emits IR for element loops at the builder's position; T is *wide*, float32 or float64."""

    def __init__(self, builder: ir.IRBuilder, wide: str) -> None:
        self.b = builder
        self.wide = {"float32": F32, "float64": F64}[wide]
        self.target = sum_ir.target()
        self.n_items = _N_VECTORS * sum_ir.vector_nbytes(self.target[2]) // nbytes_of(self.wide)

    def each(self, n: ir.Value, emit: Callable[[ir.Value, int], None]) -> None:
        """Emit loops over *n* elements; *emit* gets the index of the first element and the number of elements there."""
        whole = self.b.and_(n, I64(-self.n_items))
        for start, end, step in ((I64(0), whole, self.n_items), (whole, n, 1)):
            with cgutils.for_range_slice(self.b, start, end, I64(step), I64) as (index, _):
                emit(index, step)

    def load(self, source: ir.Value, name: str, index: ir.Value, n_items: int) -> ir.Value:
        """Load elements of the wire dtype *name*, widened exactly to T."""
        element = self._element(name)
        pointer = self.b.gep(self.b.bitcast(source, element.wire.as_pointer()), [index])
        loaded = self.b.load(self.b.bitcast(pointer, shape(element.wire, n_items).as_pointer()))
        loaded.align = nbytes_of(element.wire)
        value = element.widen_in_order(loaded, n_items)
        return value if element.wide == self.wide else self.b.fpext(value, shape(self.wide, n_items))

    def store(self, value: ir.Value, target: ir.Value, name: str, index: ir.Value, n_items: int) -> None:
        """Store elements of T rounded to the wire dtype *name*: halves by way of float32, any NaN to the quiet NaN."""
        element = self._element(name)
        if element.wide != self.wide:
            value = self.b.fptrunc(value, shape(element.wide, n_items))
        bits = element.finish_in_order(value, n_items)
        pointer = self.b.gep(self.b.bitcast(target, element.wire.as_pointer()), [index])
        stored = self.b.store(bits, self.b.bitcast(pointer, bits.type.as_pointer()))
        stored.align = nbytes_of(element.wire)

    def finite(self, value: ir.Value, n_items: int) -> ir.Value:
        """Return *value*, 0 where it is NaN or infinite."""
        infinity = constant(self.wide, math.inf, n_items)
        is_finite = self.b.fcmp_ordered("<", self.magnitude(value), infinity)
        return self.b.select(is_finite, value, constant(self.wide, 0.0, n_items))

    def magnitude(self, value: ir.Value) -> ir.Value:
        """Return |value|."""
        return call_float(self.b, "fabs", value)

    def rounded(self, scalar: ir.Value) -> ir.Value:
        """Return a double as T."""
        return scalar if self.wide == F64 else self.b.fptrunc(scalar, F32)

    def splat(self, scalar: ir.Value, n_items: int) -> ir.Value:
        """Return *scalar* in every item."""
        return self._element("float32").splat(scalar, n_items)

    def is_given(self, pointer: ir.Value) -> ir.Value:
        """Return whether *pointer* is not NULL."""
        return self.b.icmp_unsigned("!=", self.b.ptrtoint(pointer, I64), I64(0))

    def _element(self, name: str) -> Element:
        return Element(self.b, name, self.target[0], self.target[2])


def wide_name(pointer: Any) -> str:
    """Return the name of T of a kernel whose argument *pointer* is a pointer to T."""
    return str(pointer.dtype.name)
