"""Decodes random or damaged frames in memory where an access out of bounds ends the process.

``python -m tests.support.fuzzed_frames SEED N_FRAMES`` prints how many frames were accepted and how many were refused.
"""
from __future__ import annotations

import sys

import numpy as np

from bpsfast.kernels.codecs import codec_kernels, codec_reference
from bpsfast.orchestration.codec import FRAME_NBYTES, count, flags_of, frame_nbytes
from tests.support.codec_kernel_calls import CODECS, DECODE, ENCODE, draw_values
from tests.support.guarded_memory import GuardedMemory

_MOST_ELEMENTS = 700
_NUMBERS = (0, 1, 33, 0x7FC00000, 0x80000000, 0xFFFFFFFF)
_MOST_NBYTES = 32 * _MOST_ELEMENTS + 4096


class Arena:
    """All arguments of a kernel, each before a guarded page."""

    def __init__(self) -> None:
        self.wire, self.x, self.out, self.scratch = (GuardedMemory(_MOST_NBYTES + 65536) for _ in range(4))


def damage(frame: bytes, rng: np.random.Generator) -> bytes:
    """Return *frame* with one damage, or random bytes."""
    changed = bytearray(frame)
    accident = rng.integers(0, 6)
    if accident == 0:
        return rng.bytes(int(rng.integers(0, 2 * len(frame) + 20)))
    if accident == 1:
        return rng.bytes(len(frame))
    if accident == 2:
        return frame[: int(rng.integers(0, len(frame) + 1))]
    if accident == 3:
        return frame + rng.bytes(int(rng.integers(1, 17)))
    if accident == 4 and frame:  # a length, an index or a norm
        at = int(rng.integers(0, len(frame))) // 4 * 4
        changed[at : at + 4] = _NUMBERS[int(rng.integers(0, len(_NUMBERS)))].to_bytes(4, "little")
        return bytes(changed[: len(frame)])
    for _ in range(int(rng.integers(1, 5)) if frame else 0):
        changed[int(rng.integers(0, len(frame)))] ^= 1 << int(rng.integers(0, 8))
    return bytes(changed)


def try_one(arena: Arena, rng: np.random.Generator) -> bool:
    """Encode, damage, decode; return whether it was accepted. The reference must then decode the same values."""
    codec = CODECS[int(rng.integers(0, len(CODECS)))]
    wide = ("float32", "float64")[int(rng.integers(0, 2))]
    n = int(rng.integers(1, _MOST_ELEMENTS))
    dtype, k, flags = codec_reference.wide_dtype(wide), count(codec, n), flags_of(codec)
    at = codec_kernels.addresses(codec, wide)
    scratch = arena.scratch.take(codec_kernels.scratch_nbytes(codec, n, wide))
    scratch[:] = 0xFF
    x = arena.x.take(n * dtype.itemsize).view(dtype)
    x[:] = draw_values(("moderate", "mixed", "few", "infinite")[int(rng.integers(0, 4))], n, dtype,
                       int(rng.integers(0, 1 << 32)))
    wire = arena.wire.take(frame_nbytes(codec, n, wide) - FRAME_NBYTES)
    words = np.full(2, codec.seed, np.uint64)
    error = arena.out.take(x.nbytes).view(dtype)
    written = ENCODE(at.encode)(wire.ctypes.data, wire.size, x.ctypes.data, n, error.ctypes.data, words.ctypes.data, k,
                                flags, scratch.ctypes.data)
    frame = wire[:written].tobytes()
    is_whole = bool(rng.integers(0, 10) == 0)
    sent = frame if is_whole else damage(frame, rng)
    wire = arena.wire.take(len(sent))
    wire[:] = np.frombuffer(sent, np.uint8)
    add = bool(rng.integers(0, 2))
    out = arena.out.take(n * dtype.itemsize).view(dtype)
    out[:] = x
    result = DECODE(at.decode)(out.ctypes.data, n, wire.ctypes.data, len(sent), k, flags, add, scratch.ctypes.data)
    if result == 0:
        want = codec_reference.add(codec, sent, x) if add else codec_reference.decode(codec, sent, n, wide)
        assert out.tobytes() == want.tobytes(), (codec, wide, n, add, sent)
    assert result in ((0,) if is_whole else (0, -1)), (codec, wide, n, result, sent)
    return bool(result == 0)


def main(seed: int, n_frames: int) -> None:
    """Try *n_frames*."""
    rng = np.random.default_rng(seed)
    arena = Arena()
    n_taken = sum(try_one(arena, rng) for _ in range(n_frames))
    print(f"{n_taken} taken, {n_frames - n_taken} refused")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
