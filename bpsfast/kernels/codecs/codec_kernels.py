"""Compiles the kernels that compress and decompress partitions, on first use, and gives their addresses.

C signatures, where T is float32, for float64 tensors float64; D is the tensor's dtype; and lengths are numbers of
elements unless they are named nbytes::

    int64 encode(uint8 *wire, int64 room_nbytes, const T *x, int64 n, T *error, uint64 *generator, int64 k,
                 int64 flags, uint8 *scratch)
    int64 decode(T *out, int64 n, const uint8 *wire, int64 nbytes, int64 k, int64 flags, int64 add, uint8 *scratch)
    void feed(T *v, const D *x, T *e, T *m, int64 n, double mu, double ratio)
    void divide(T *acc, int64 n, double divisor)
    void narrow(D *out, const T *v, int64 n)

encode returns the number of bytes written (the format alone, without a length), or -1 if they do not fit; the contents
of its outputs are then undefined. *error* is NULL, or gets x - decode(wire), 0 where that is not finite; it may be x.
*generator* has the two words of `codec_reference.Generator`, for codecs that draw random numbers.

decode returns 0, or -1 for an invalid frame, when the contents of *out* are undefined. Whatever the frame holds, it
reads nothing beyond *nbytes* and writes nothing beyond *n*. With *add* it adds to *out*.

feed: v = x; with *m*: m = mu*m + v, v = v + mu*m; with *e*: v = v + ratio*e. *e* and *m* may be NULL, *v* may be *e*.
divide is true division. narrow rounds to nearest even. ratio, mu and divisor are rounded to T first.

k is `codec.count`, flags are `codec.flags_of`, scratch has `scratch_nbytes` bytes of any content. *wire*, *scratch* and
*generator* are 8-byte aligned, arrays are aligned to their elements. Arguments must not overlap except as said above.
All arithmetic equals that of `codec_reference`, bit for bit. The code takes no lock, allocates nothing, raises nothing,
needs no GIL, and may run on any number of threads.

Each takes 0.1 to 1 s to compile; numba's disk cache is used as by `bpsfast.kernels`. This module imports no numba.
"""
from __future__ import annotations

from typing import Any, NamedTuple

from bpsfast import kernels
from bpsfast.orchestration import codec as codecs
from bpsfast.orchestration.codec import CodecSpec


class Addresses(NamedTuple):
    """The addresses of the kernels of one codec and dtype; *feed_wide* is `feed` with D = T, for sums of frames."""

    encode: int
    decode: int
    feed: int
    feed_wide: int
    divide: int
    narrow: int


def addresses(codec: CodecSpec, dtype: str) -> Addresses:
    """Return the addresses of the kernels of *codec* for tensors of *dtype*, compiling them on first use. Thread-safe.

    The code lives as long as the process. Raises `UnsupportedError` for a dtype that cannot be compressed.
    """
    wide = wide_name(dtype)
    return Addresses(address(f"encode_{codec.kind}", wide), address(f"decode_{codec.kind}", wide),
                     address("feed", dtype), address("feed", wide), address("divide", wide), address("narrow", dtype))


def address(kernel: str, dtype: str) -> int:
    """Return the address of one kernel ("encode_topk", "feed", ...) of *dtype*, compiling it on first use."""
    return kernels.compiled_address((kernel, dtype), lambda: _compile(kernel, dtype))


def wide_name(dtype: str) -> str:
    """Return the name of T for tensors of *dtype*; raises `UnsupportedError` if they cannot be compressed."""
    return "float64" if codecs.width_of(dtype) == 8 else "float32"


def scratch_nbytes(codec: CodecSpec, n: int, dtype: str) -> int:
    """Return the bytes of scratch memory for encode and decode of *n* elements."""
    if codec.kind == "topk":
        from bpsfast.kernels.codecs import sparse_pairs

        return sparse_pairs.scratch_nbytes(codecs.count(codec, n), n, codecs.width_of(dtype))
    if codec.kind == "dithering":
        from bpsfast.kernels.codecs import dithering

        return 2 * 8 * dithering.CHUNK
    return 8 * -(-n // 64) if codec.kind == "randomk" else 0


def _compile(kernel: str, dtype: str) -> Any:
    from bpsfast.kernels.codecs import compilation

    return compilation.compile_kernel(kernel, dtype, wide_name(dtype))
