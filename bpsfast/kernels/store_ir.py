"""Emits the kernels that update stored weights (`stores`) as LLVM IR, and compiles them by numba."""
from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from . import element_ir, sum_ir
from .codecs import elements
from .codecs.elements import Elements, name_of, pointer_to
from .element_ir import I64

#: What a kernel does, its argument *what*, as `pyx/store.h` numbers it.
READ, SET, ADD, NESTEROV, SHARE = range(5)


def compile_kernel(name: str, cache: bool) -> Any:
    """Compile the kernel of the wire dtype *name*; return numba's cfunc, its owner. *cache*: as in `sum_ir`."""
    def kernel(values, weights, momentum, n_elements, what, learning_rate, mu):  # type: ignore[no-untyped-def]
        _step(values, weights, momentum, n_elements, what, learning_rate, mu)  # type: ignore[call-arg]

    files = [__file__, element_ir.__file__, elements.__file__, sum_ir.__file__]
    kernel.__qualname__ = f"store_{name}" + (f"_{sum_ir.fingerprint(files)}" if cache else "")
    signature = types.void(pointer_to(name), types.voidptr, types.voidptr, types.int64, types.int64, types.float64,
                           types.float64)
    return cfunc(signature, cache=cache)(kernel)


@intrinsic
def _step(typing, values, weights, momentum, n_elements, what, learning_rate, mu):  # type: ignore[no-untyped-def]
    name = name_of(values)

    def emit(builder: ir.IRBuilder, *args: ir.Value) -> None:
        step = _Step(builder, name, args)
        for kind in (READ, SET, ADD, NESTEROV, SHARE):
            with builder.if_then(builder.icmp_signed("==", args[4], I64(kind))):
                step.elements.each(args[3], partial(step.emit, kind))

    return element_ir.emits(types.void(values, weights, momentum, n_elements, what, learning_rate, mu), emit)


class _Step:
    """Emits the steps of a kernel with the arguments *args*, for tensors of the wire dtype *name*."""

    def __init__(self, builder: ir.IRBuilder, name: str, args: Any) -> None:
        self.b = builder
        self.name = name
        self.wide = "float64" if name == "float64" else "float32"
        self.elements = Elements(builder, self.wide)
        self.values, self.weights, self.momentum = args[:3]
        self.rate, self.mu = map(self.elements.rounded, args[5:])

    def emit(self, kind: int, index: ir.Value, n_items: int) -> None:
        """Emit what a step of *kind* does to *n_items* elements from *index* on."""
        b, elements = self.b, self.elements

        def load(memory: ir.Value) -> ir.Value:
            return elements.load(memory, self.wide, index, n_items)

        if kind == READ:
            elements.store(load(self.weights), self.values, self.name, index, n_items)
            return
        value = elements.load(self.values, self.name, index, n_items)
        if kind == ADD:
            value = b.fadd(load(self.weights), value)
        elif kind == SHARE:
            value = b.fadd(load(self.weights), b.fdiv(value, elements.splat(self.rate, n_items)))
        elif kind == NESTEROV:
            rate, mu = (elements.splat(factor, n_items) for factor in (self.rate, self.mu))
            momentum = b.fadd(b.fmul(mu, load(self.momentum)), value)
            elements.store(momentum, self.momentum, self.wide, index, n_items)
            value = b.fsub(load(self.weights), b.fmul(rate, b.fadd(value, b.fmul(mu, momentum))))
        elements.store(value, self.weights, self.wide, index, n_items)
