"""Emits the kernels that update stored weights (`stores`) as LLVM IR, and compiles them by numba."""
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from . import element_ir, sum_ir
from .codecs import elements
from .codecs.elements import Elements, name_of, pointer_to
from .element_ir import F32, I64

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
        for number, emit_step in ((READ, step.read), (SET, step.set), (ADD, step.add), (NESTEROV, step.nesterov),
                                  (SHARE, step.share)):
            with builder.if_then(builder.icmp_signed("==", args[4], I64(number))):
                step.elements.each(args[3], emit_step)

    return element_ir.emits(types.void(values, weights, momentum, n_elements, what, learning_rate, mu), emit)


class _Step:
    """Emit each of the steps for the elements at an index; *args* are the kernel's arguments."""

    def __init__(self, builder: ir.IRBuilder, name: str, args: Any) -> None:
        self.b = builder
        self.name = name
        self.wide = "float64" if name == "float64" else "float32"
        self.elements = Elements(builder, self.wide)
        self.values, self.weights, self.momentum = args[:3]
        self.rate, self.mu = (builder.fptrunc(factor, F32) if self.wide == "float32" else factor for factor in args[5:])
        self.element = element_ir.Element(builder, self.wide, "", "")

    def _values(self, index: ir.Value, n_items: int) -> ir.Value:
        return self.elements.load(self.values, self.name, index, n_items)

    def _kept(self, memory: ir.Value, index: ir.Value, n_items: int) -> ir.Value:
        return self.elements.load(memory, self.wide, index, n_items)

    def read(self, index: ir.Value, n_items: int) -> None:
        """Copy the weights out."""
        self.elements.store(self._kept(self.weights, index, n_items), self.values, self.name, index, n_items)

    def set(self, index: ir.Value, n_items: int) -> None:
        """Replace the weights."""
        self.elements.store(self._values(index, n_items), self.weights, self.wide, index, n_items)

    def add(self, index: ir.Value, n_items: int) -> None:
        """Add to the weights."""
        total = self.b.fadd(self._kept(self.weights, index, n_items), self._values(index, n_items))
        self.elements.store(total, self.weights, self.wide, index, n_items)

    def share(self, index: ir.Value, n_items: int) -> None:
        """Add one of several equal parts of the values to the weights."""
        part = self.b.fdiv(self._values(index, n_items), self.element.splat(self.rate, n_items))
        total = self.b.fadd(self._kept(self.weights, index, n_items), part)
        self.elements.store(total, self.weights, self.wide, index, n_items)

    def nesterov(self, index: ir.Value, n_items: int) -> None:
        """Make an outer step."""
        b = self.b
        rate, mu = (self.element.splat(factor, n_items) for factor in (self.rate, self.mu))
        gradient = self._values(index, n_items)
        momentum = b.fadd(b.fmul(mu, self._kept(self.momentum, index, n_items)), gradient)
        self.elements.store(momentum, self.momentum, self.wide, index, n_items)
        move = b.fmul(rate, b.fadd(gradient, b.fmul(mu, momentum)))
        weights = b.fsub(self._kept(self.weights, index, n_items), move)
        self.elements.store(weights, self.weights, self.wide, index, n_items)
