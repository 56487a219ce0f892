"""Between a tensor and its codec: momentum, error feedback, the average, and rounding to the tensor's dtype."""
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bpsfast.kernels.codecs.elements import Elements, name_of, wide_name


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

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        Feed(builder, wide, name, args).build()
        return context.get_dummy_value()

    return types.void(v, x, e, m, n, mu, ratio), codegen


@intrinsic
def _divide(typing, acc, n, divisor):  # type: ignore[no-untyped-def]
    wide = wide_name(acc)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        acc, n, divisor = args
        elements = Elements(builder, wide)
        rounded = elements.rounded(divisor)

        def emit(index: Any, n_lanes: int) -> None:
            value = elements.load(acc, wide, index, n_lanes)
            elements.store(builder.fdiv(value, elements.splat(rounded, n_lanes)), acc, wide, index, n_lanes)

        elements.each(n, emit)
        return context.get_dummy_value()

    return types.void(acc, n, divisor), codegen


@intrinsic
def _narrow(typing, out, v, n):  # type: ignore[no-untyped-def]
    wide, name = wide_name(v), name_of(out)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        out, v, n = args
        elements = Elements(builder, wide)
        elements.each(n, lambda index, n_lanes: elements.store(elements.load(v, wide, index, n_lanes), out, name,
                                                               index, n_lanes))
        return context.get_dummy_value()

    return types.void(out, v, n), codegen


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
        with self.b.if_else(self.elements.is_given(self.m)) as (moving, still):
            with moving:
                self.with_or_without_error(has_momentum=True)
            with still:
                self.with_or_without_error(has_momentum=False)

    def with_or_without_error(self, has_momentum: bool) -> None:
        """Emit two."""
        with self.b.if_else(self.elements.is_given(self.e)) as (then, otherwise):
            with then:
                self.elements.each(self.n, lambda index, n_lanes: self.emit(index, n_lanes, has_momentum, True))
            with otherwise:
                self.elements.each(self.n, lambda index, n_lanes: self.emit(index, n_lanes, has_momentum, False))

    def emit(self, index: ir.Value, n_lanes: int, has_momentum: bool, has_error: bool) -> None:
        """Emit the arithmetic of the elements from *index* on."""
        b, elements = self.b, self.elements
        value = elements.load(self.x, self.name, index, n_lanes)
        if has_momentum:
            mu = elements.splat(self.mu, n_lanes)
            momentum = b.fadd(b.fmul(mu, elements.load(self.m, self.wide, index, n_lanes)), value)
            value = b.fadd(value, b.fmul(mu, momentum))
            elements.store(elements.finite(momentum, n_lanes), self.m, self.wide, index, n_lanes)
        if has_error:
            error = elements.load(self.e, self.wide, index, n_lanes)
            value = b.fadd(value, b.fmul(elements.splat(self.ratio, n_lanes), error))
        elements.store(value, self.v, self.wide, index, n_lanes)
