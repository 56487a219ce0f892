"""Emits the kernel that sums all inputs of a partition in one pass as LLVM IR, and compiles it by numba.

Why IR rather than a numba loop: numba has no half on a CPU, promotes 32-bit integer arithmetic to 64 bit
(bfloat16 at half speed) and cannot say "non-temporal". The loop nest, for one dtype:

    for each chunk of some vectors:                              (accumulators stay in registers)
        total = identity;  for before: total += widen(load)
        part  = identity;  for local:  part  += widen(load)
        total += widen(narrow(part))                             this node's partial, at its place in the order
        for after: total += widen(load)
        divide (a branch round it when the divisor is 1), round once, store (plain or non-temporal)
    the rest, element by element, through the same code with vectors of one

With at most one local input nothing is rounded in between, and all inputs go through the first loop. The
identity starts the sums without touching a bit (`Element.identity`), so an empty group needs no branch.

Few inputs, the common case, have loops of their own (`_LAYOUTS`) that keep every pointer in a register and branch on
no input: 5 to 8 % less time from DRAM than the nest above, which serves any number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from bpsfast.kernels import element_ir
from bpsfast.kernels.element_ir import I32, I64, Element, emit_both, emits


class Tuning(NamedTuple):
    """How the sum kernel is laid out for a make of CPU.

    *n_registers*: accumulators per chunk; enough independent additions, and few enough that nothing spills (AVX2 has 16
    registers: with 8 the two-level form spills once a chunk, and is faster still than with 4). *prefetch_nbytes*: how
    far ahead of each load lines are asked for, into L1 (*level* 3) or L2 (2); 0: not at all.
    """

    n_registers: int
    prefetch_nbytes: int
    level: int


# Measured with partitions of 4 MB, cold and warm. Xeon: its prefetchers stop at page ends; 4 to 32 KiB ahead are alike,
# 5 % (DRAM) to 10 % (L3) faster than none. Zen 5: so far ahead costs 20 %; a few lines ahead gain 3 % where halves are
# widened, and cost 1 to 2 % where they are not.
_XEON = Tuning(8, 8192, 2)
_ZEN = Tuning(4, 0, 3)
_ZEN_HALVES = Tuning(4, 256, 3)


def _tuning(cpu: str, itemsize: int) -> Tuning:
    """Choose for a CPU by LLVM's name and the wire dtype's size."""
    if cpu.startswith("znver"):
        return _ZEN_HALVES if itemsize == 2 else _ZEN
    return _XEON


class InputLayout(NamedTuple):
    """Numbers of inputs: partials of nodes before, local inputs, partials after; without a local sum all are before."""

    n_before: int
    n_local: int
    n_after: int


def _layouts(most: int) -> tuple[InputLayout, ...]:
    """List the layouts of at most *most* inputs."""
    flat = [InputLayout(n, 0, 0) for n in range(1, most + 1)]
    two_level = [InputLayout(before, local, after) for local in range(2, most + 1)
                 for before in range(most - local + 1) for after in range(most - local - before + 1)]
    return (*flat, *two_level)


_MOST = 4  # what two machines of three ranks, or three of two, come to
_LAYOUTS = _layouts(_MOST)
_BASE = _MOST + 1


def _code(n_before: int, n_local: int, n_after: int) -> int:
    """Return the number of a layout of at most `_MOST` inputs; 0 is that of none."""
    return (n_before * _BASE + n_local) * _BASE + n_after

# Inputs with load instructions of their own. Prefetchers that tell streams apart by the instruction see one stream that
# jumps about where a loop loads every input: 1.5 times the time from DRAM, 1.25 times from L3 (Zen 5).
_N_UNROLLED = 8


def target() -> tuple[str, str, str]:
    """Return (triple, CPU name, features) numba compiles for; follows NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()[:3]
    return triple, cpu, features


def compile_kernel(name: str, cache: bool, op: str = "sum") -> Any:
    """Compile the kernel of a wire dtype *name* and *op* (`partition.OPS`); return numba's cfunc, which owns the code.

    With *cache* the machine code is looked up in and saved to numba's disk cache. Raises whatever numba raises
    where that cache cannot be used (`RuntimeError`, `OSError`, unpickling errors).
    """
    def kernel(dst, inputs, n_before, n_local, n_after, n_elements, divisor, nontemporal):  # type: ignore[no-untyped-def]
        _fused_sum(dst, inputs, n_before, n_local, n_after, n_elements, divisor, nontemporal)  # type: ignore[call-arg]

    kernel.__qualname__ = f"fused_{op}_{name}" + (f"_{fingerprint([element_ir.__file__, __file__])}" if cache else "")
    pointer = types.CPointer(types.Opaque(f"bpsfast.{name}.{op}"))
    signature = types.void(pointer, types.CPointer(types.voidptr), *[types.int64] * 6)
    return cfunc(signature, cache=cache)(kernel)


def fingerprint(files: Iterable[str | Path]) -> str:
    """Return a short hash of the CPU and of the source *files* of a kernel, for the name of its cache file.

    CPU: numba keeps one index file per name and numbers its data files. Two processes that fill one index with
    different entries at the same time can make one entry point at the other's code; so no two entries share a name.
    Source: numba hashes only the file of the compiled function, and the code comes from several.
    """
    parts = [*target(), *(Path(file).read_text() for file in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@intrinsic
def _fused_sum(typing, dst, inputs, n_before, n_local, n_after, n_elements, divisor, nontemporal):  # type: ignore
    name, op = dst.dtype.name.removeprefix("bpsfast.").split(".")
    return emits(types.void(dst, inputs, n_before, n_local, n_after, n_elements, divisor, nontemporal),
                 lambda builder, *args: SumLoop(builder, name, target(), args, op).build())


def vector_nbytes(features: str) -> int:
    """Return the widest vector of the CPU in bytes; 16 is what every 64-bit CPU has."""
    listed = features.split(",")
    return 64 if "+avx512f" in listed else 32 if "+avx" in listed else 16


class SumLoop:
    """Emit the loop nest for one dtype at the builder's position, for a CPU as `target` describes it.

    *args* are the kernel's eight arguments.
    """

    def __init__(self, builder: ir.IRBuilder, name: str, target: tuple[str, str, str], args: Any,
                 op: str = "sum") -> None:
        self.b = builder
        triple, cpu, features = target
        self.element = Element(builder, name, triple, features, op)
        self.is_x86 = triple.startswith(("x86", "i686"))
        wire, self.itemsize = self.element.wire, element_ir.nbytes_of(self.element.wire)
        self.tuning = _tuning(cpu, self.itemsize)
        self.n_items = vector_nbytes(features) // self.itemsize  # loads and stores of full width
        self.n_vectors = self.tuning.n_registers * self.itemsize // element_ir.nbytes_of(self.element.wide)
        dst, inputs, n_before, n_local, n_after, self.n_elements, self.divisor, nontemporal = args
        self.dst = builder.bitcast(dst, wire.as_pointer())
        self.inputs = builder.bitcast(inputs, wire.as_pointer().as_pointer())
        local_end = builder.add(n_before, n_local)
        self.ends = n_before, local_end, builder.add(local_end, n_after)
        self.two_level = builder.icmp_signed(">", n_local, I64(1))
        self.averages = builder.icmp_signed("!=", self.divisor, I64(1))
        aligned = builder.icmp_unsigned("==", builder.and_(builder.ptrtoint(dst, I64), I64(63)), I64(0))
        self.streams = builder.and_(builder.icmp_signed("!=", nontemporal, I64(0)), aligned)

    def build(self) -> None:
        """Emit: whole chunks, then the rest by single elements, then the fence of the non-temporal stores."""
        b, n_chunk = self.b, self.n_vectors * self.n_items
        in_chunks = b.and_(self.n_elements, I64(-n_chunk))
        any_layout, rest = b.append_basic_block("any_layout"), b.append_basic_block("rest")
        ways = b.switch(self.layout_code(), any_layout)
        for layout in _LAYOUTS:
            way = b.append_basic_block("layout")
            ways.add_case(I64(_code(*layout)), way)
            b.position_at_end(way)
            sources = [b.load(b.gep(self.inputs, [I64(k)])) for k in range(sum(layout))]
            with cgutils.for_range_slice(b, I64(0), in_chunks, I64(n_chunk)) as (index, _):
                self.known_chunk(layout, sources, index)
            b.branch(rest)
        b.position_at_end(any_layout)
        with cgutils.for_range_slice(b, I64(0), in_chunks, I64(n_chunk)) as (index, _):
            self.chunk(index, self.n_vectors, self.n_items)
        b.branch(rest)
        b.position_at_end(rest)
        with cgutils.for_range_slice(b, in_chunks, self.n_elements, I64(1)) as (index, _):
            self.chunk(index, 1, 1)
        if self.is_x86:  # elsewhere the release of the publishing store orders them
            with b.if_then(self.streams):
                fence = ir.FunctionType(ir.VoidType(), [])
                b.call(cgutils.get_or_insert_function(b.module, fence, "llvm.x86.sse.sfence"), [])

    def layout_code(self) -> ir.Value:
        """Return `_code` of the call's layout, or a number that no layout in `_LAYOUTS` has."""
        b = self.b
        before, local, everything = self.ends
        code = b.add(b.mul(before, I64(_BASE)), b.sub(local, before))
        code = b.add(b.mul(code, I64(_BASE)), b.sub(everything, local))
        code = b.select(self.two_level, code, b.mul(everything, I64(_BASE * _BASE)))
        return b.select(b.icmp_signed("<", everything, I64(_BASE)), code, I64(0))

    def known_chunk(self, layout: InputLayout, sources: list[ir.Value], index: ir.Value) -> None:
        """Make one chunk at *index* from inputs whose number is known here and whose pointers are at hand."""
        start = [self.element.identity(self.n_items)] * self.n_vectors
        local_end = layout.n_before + layout.n_local
        total = self.add_sources(start, sources[: layout.n_before], index)
        if layout.n_local:
            part = self.add_sources(start, sources[layout.n_before : local_end], index)
            total = self.add_part(total, part, self.n_items)
            total = self.add_sources(total, sources[local_end:], index)
        self.finish_chunk(total, index, self.n_items)

    def add_sources(self, sums: list[ir.Value], sources: list[ir.Value], index: ir.Value) -> list[ir.Value]:
        """Add the chunk at *index* of each of *sources* to *sums*, in this order; return the new sums."""
        for source in sources:
            sums = self.add_chunk_of(self.b.gep(source, [index]), sums, self.n_items)
        return sums

    def chunk(self, index: ir.Value, n_vectors: int, n_items: int) -> None:
        """Make ``n_vectors * n_items`` elements from *index* on out of any number of inputs."""
        b = self.b
        start = [self.element.identity(n_items)] * n_vectors
        before, local, everything = self.ends
        total = self.add_inputs(start, I64(0), b.select(self.two_level, before, everything), index, n_items)
        one_level, in_block = total, b.block
        with b.if_then(self.two_level):
            part = self.add_inputs(start, before, local, index, n_items)
            total = self.add_part(total, part, n_items)
            total = self.add_inputs(total, local, everything, index, n_items)
            out_block = b.block
        self.finish_chunk(self.merge((one_level, in_block), (total, out_block)), index, n_items)

    def add_part(self, total: list[ir.Value], part: list[ir.Value], n_items: int) -> list[ir.Value]:
        """Add this node's own sum as the wire would carry it: rounded to the wire dtype."""
        element = self.element
        rounded = [element.widen(element.narrow(value, n_items), n_items) for value in part]
        return [element.combine(value, term) for value, term in zip(total, rounded)]

    def finish_chunk(self, total: list[ir.Value], index: ir.Value, n_items: int) -> None:
        """Average, round and store the sums at *index*."""
        b, element = self.b, self.element
        whole, in_block = total, b.block
        with b.if_then(self.averages):
            quotients = [element.divide(value, self.divisor, n_items) for value in total]
            out_block = b.block
        total = self.merge((whole, in_block), (quotients, out_block))
        self.store_chunk([element.finish(value, n_items) for value in total], index, n_items)

    def add_inputs(self, start: list[ir.Value], first: ir.Value, end: ir.Value, index: ir.Value, n_items: int
                   ) -> list[ir.Value]:
        """Add inputs ``first .. end-1`` to *start*, in this order; return the accumulators."""
        b = self.b
        entry, done = b.block, b.append_basic_block("inputs.done")
        bodies = [b.append_basic_block(f"inputs.{i}") for i in range(_N_UNROLLED if n_items > 1 else 1)]
        b.cbranch(b.icmp_signed("<", first, end), bodies[0], done)
        ways = [(start, entry)]
        b.position_at_end(bodies[0])
        k = b.phi(I64)
        sums = [b.phi(value.type) for value in start]
        next_k, new = k, sums
        for body, following in zip(bodies, [*bodies[1:], bodies[0]]):
            b.position_at_end(body)
            source = b.gep(b.load(b.gep(self.inputs, [next_k])), [index])
            new = self.add_chunk_of(source, new, n_items)
            next_k = b.add(next_k, I64(1))
            b.cbranch(b.icmp_signed("<", next_k, end), following, done)
            ways.append((new, body))
        for phi, value, again in zip([k, *sums], [first, *start], [next_k, *new]):
            phi.add_incoming(value, entry)
            phi.add_incoming(again, bodies[-1])
        b.position_at_end(done)
        return self.merge(*ways)

    def merge(self, *ways: tuple[list[ir.Value], ir.Block]) -> list[ir.Value]:
        """Return the values as they are on whichever of the *ways* led here."""
        phis = [self.b.phi(value.type) for value in ways[0][0]]
        for values, block in ways:
            for phi, value in zip(phis, values):
                phi.add_incoming(value, block)
        return phis

    def add_chunk_of(self, source: ir.Value, sums: list[ir.Value], n_items: int) -> list[ir.Value]:
        """Add the vectors at *source* to *sums*; return the new sums."""
        return [self.element.combine(value, self.load(source, i, n_items)) for i, value in enumerate(sums)]

    def load(self, source: ir.Value, i: int, n_items: int) -> ir.Value:
        """Load vector *i* of the chunk at *source* and widen it; inputs need only their own alignment."""
        pointer = self.b.gep(source, [I64(i * n_items)])
        vector = element_ir.shape(self.element.wire, n_items)
        if n_items > 1 and self.tuning.prefetch_nbytes:
            self.prefetch(pointer)
        loaded = self.b.load(self.b.bitcast(pointer, vector.as_pointer()))
        loaded.align = self.itemsize
        return self.element.widen(loaded, n_items)

    def prefetch(self, pointer: ir.Value) -> None:
        """Ask for a line some way after *pointer*, for reading; harmless beyond the end."""
        b = self.b
        byte = ir.IntType(8).as_pointer()
        ahead = b.gep(b.bitcast(pointer, byte), [I64(self.tuning.prefetch_nbytes)])
        signature = ir.FunctionType(ir.VoidType(), [byte, *[ir.IntType(32)] * 3])
        function = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0i8")
        b.call(function, [ahead, I32(0), I32(self.tuning.level), I32(1)])

    def store_chunk(self, values: list[ir.Value], index: ir.Value, n_items: int) -> None:
        """Store one chunk at element *index* of dst, past the caches if asked for."""
        if n_items == 1:
            self.store(values, index, n_items, streams=False)
        else:
            emit_both(self.b, self.streams, lambda streams: self.store(values, index, n_items, streams))

    def store(self, values: list[ir.Value], index: ir.Value, n_items: int, streams: bool) -> None:
        """Store *values*; non-temporal stores rely on the 64-byte alignment that `streams` implies."""
        b = self.b
        for i, value in enumerate(values):
            pointer = b.gep(self.dst, [b.add(index, I64(i * n_items))])
            stored = b.store(value, b.bitcast(pointer, value.type.as_pointer()))
            stored.align = self.itemsize * (n_items if streams else 1)
            if streams:
                stored.set_metadata("nontemporal", b.module.add_metadata([I32(1)]))
