"""Kernels that run before and after a codec: momentum, error feedback, the average, rounding to the tensor's dtype."""
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bpsfast.kernels.codecs.elements import Elements, name_of, wide_name
from bpsfast.kernels.element_ir import emit_both, emits


def feed(v, x, e, m, n, mu, ratio):  # type: ignore[no-untyped-def]
    """See `codec_kernels`."""
    _feed(v, x, e, m, n, mu, ratio)


def divide(acc, n, divisor):  # type: ignore[no-untyped-def]
    """See `codec_kernels`."""
    _divide(acc, n, divisor)


def narrow(out, v, n):  # type: ignore[no-untyped-def]
    """See `codec_kernels`."""
    _narrow(out, v, n)


@intrinsic
def _feed(typing, v, x, e, m, n, mu, ratio):  # type: ignore[no-untyped-def]
    wide, name = wide_name(v), name_of(x)
    return emits(types.void(v, x, e, m, n, mu, ratio), lambda builder, *args: Feed(builder, wide, name, args).build())


@intrinsic
def _divide(typing, acc, n, divisor):  # type: ignore[no-untyped-def]
    wide = wide_name(acc)

    def emit(builder: ir.IRBuilder, acc: ir.Value, n: ir.Value, divisor: ir.Value) -> None:
        elements = Elements(builder, wide)
        rounded = elements.rounded(divisor)
        elements.each(n, lambda index, n_items: elements.store(
            builder.fdiv(elements.load(acc, wide, index, n_items), elements.splat(rounded, n_items)), acc, wide, index,
            n_items))

    return emits(types.void(acc, n, divisor), emit)


@intrinsic
def _narrow(typing, out, v, n):  # type: ignore[no-untyped-def]
    wide, name = wide_name(v), name_of(out)

    def emit(builder: ir.IRBuilder, out: ir.Value, v: ir.Value, n: ir.Value) -> None:
        elements = Elements(builder, wide)
        elements.each(n, lambda index, n_items: elements.store(elements.load(v, wide, index, n_items), out, name,
                                                               index, n_items))

    return emits(types.void(out, v, n), emit)


class Feed:
    """Emit `feed` for one dtype: a loop for each of with and without momentum and error."""

    def __init__(self, builder: ir.IRBuilder, wide: str, name: str, args: Any) -> None:
        self.b = builder
        self.elements = Elements(builder, wide)
        self.wide = wide
        self.name = name
        self.v, self.x, self.e, self.m, self.n, mu, ratio = args
        self.mu, self.ratio = self.elements.rounded(mu), self.elements.rounded(ratio)

    def build(self) -> None:
        """Emit all four."""
        has_momentum, has_error = self.elements.is_given(self.m), self.elements.is_given(self.e)
        emit_both(self.b, has_momentum, lambda moves: emit_both(self.b, has_error, lambda keeps: self.elements.each(
            self.n, lambda index, n_items: self.emit(index, n_items, moves, keeps))))

    def emit(self, index: ir.Value, n_items: int, has_momentum: bool, has_error: bool) -> None:
        """Emit the arithmetic of the elements from *index* on."""
        b, elements = self.b, self.elements
        value = elements.load(self.x, self.name, index, n_items)
        if has_momentum:
            mu = elements.splat(self.mu, n_items)
            momentum = b.fadd(b.fmul(mu, elements.load(self.m, self.wide, index, n_items)), value)
            value = b.fadd(value, b.fmul(mu, momentum))
            elements.store(elements.finite(momentum, n_items), self.m, self.wide, index, n_items)
        if has_error:
            error = elements.load(self.e, self.wide, index, n_items)
            value = b.fadd(value, b.fmul(elements.splat(self.ratio, n_items), error))
        elements.store(value, self.v, self.wide, index, n_items)
