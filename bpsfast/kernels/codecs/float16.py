"""float16 and bfloat16: each element rounded. `codec_reference` has the format."""
from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bpsfast.kernels.codecs.elements import Elements, wide_name


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

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            wire, x, n, error = args
            elements = Elements(builder, wide)

            def round_only(index: Any, n_lanes: int) -> None:
                elements.store(elements.load(x, wide, index, n_lanes), wire, name, index, n_lanes)

            def keep_error(index: Any, n_lanes: int) -> None:
                value = elements.load(x, wide, index, n_lanes)
                elements.store(value, wire, name, index, n_lanes)
                lost = builder.fsub(value, elements.load(wire, name, index, n_lanes))
                elements.store(elements.finite(lost, n_lanes), error, wide, index, n_lanes)

            with builder.if_else(elements.is_given(error)) as (then, otherwise):
                with then:
                    elements.each(n, keep_error)
                with otherwise:
                    elements.each(n, round_only)
            return context.get_dummy_value()

        return types.void(wire, x, n, error), codegen

    return write


def _reader(name: str) -> Any:
    @intrinsic
    def read(typing, out, n, wire, add):  # type: ignore[no-untyped-def]
        wide = wide_name(out)

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            out, n, wire, add = args
            elements = Elements(builder, wide)

            def put(index: Any, n_lanes: int) -> None:
                elements.store(elements.load(wire, name, index, n_lanes), out, wide, index, n_lanes)

            def put_sum(index: Any, n_lanes: int) -> None:
                value = elements.load(wire, name, index, n_lanes)
                total = builder.fadd(elements.load(out, wide, index, n_lanes), value)
                elements.store(total, out, wide, index, n_lanes)

            with builder.if_else(cgutils.is_not_null(builder, add)) as (then, otherwise):
                with then:
                    elements.each(n, put_sum)
                with otherwise:
                    elements.each(n, put)
            return context.get_dummy_value()

        return types.void(out, n, wire, add), codegen

    return read


_write_float16, _write_bfloat16 = _writer("float16"), _writer("bfloat16")
_read_float16, _read_bfloat16 = _reader("float16"), _reader("bfloat16")
