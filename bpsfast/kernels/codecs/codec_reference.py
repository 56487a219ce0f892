"""The formats and the arithmetic of compression as plain NumPy, to be checked against their description; the oracle
of all tests, as `bpsfast.base.reference_sum` is of sums. It shares nothing with the kernels.

T is the type a partition is compressed in: float32, of float64 tensors float64. I: the unsigned integer as wide, of w
bits. n: the elements of a partition. All is little endian. What `encode` returns lies in a frame after its length.

* onebit: bit = 1 if x < 0, w bits an I, the first is the highest, zeros after the last; then a float32: the mean |x|,
  or 1 unless scaled. Decoded: scale, or -scale where the bit is 1.
* topk: pairs (I index, T value) of the k largest |x|. Decoded: those, the others are 0.
* randomk: such pairs of k draws below n, which may repeat.
* dithering: norm = the largest |x|, or the Euclidean norm. Linear: y = |x| / norm * s, q = floor(y) + (draw < y -
  floor(y)). Natural: y = |x| / norm * 2^(s-1), f = (the power of two at or above ceil(y)) / 2 in whole numbers, l = f
  or 1 if f is 0, q = f + l * (draw < (y - f) / l). Bits of every x with q > 0: Elias delta code of the distance from
  the one before (the first: from -1), a sign, Elias delta code of q; in Is, the highest bit first, zeros after the
  last; then an I: the number of bits; a float32: the norm. Decoded: sign * q * norm / s, or / 2^(s-1).
* float16, bfloat16: x to nearest even; a float64 to float32 before.
* int8: of each block of 256 a float32 scale = max |x| / 127; then for each x a byte, rint(x / scale), 0 if scale is 0.

The first four are BytePS's, but for this, decided otherwise:

* T is never 16 bits wide: indices of 16 bits end at 65536. Such tensors are widened, which is exact.
* Pairs of topk are in the order of their indices; the largest are by the bits of |x|, of equals the first (BytePS: as
  they lie in a heap, which would be part of the format). NaN is the largest, so it is seen. k is n/2 at most.
* The sum of magnitudes (or of squares) is one of doubles in `N_LANES` lanes, of element i in lane i mod `N_LANES`; the
  lanes are added in order at the end. So it is the same on any CPU; 32 is what vectors want.
* dithering divides by the norm that is sent, a float32, so that both ends mean the same levels, all in doubles, rounded
  to T at the end; q is the highest level at most, as the rounding of a norm can make y larger than s.
* NaN and infinity are not hidden: one of them in x makes onebit's scale NaN or infinite, scaled or not, and
  dithering's norm or int8's scale NaN, and with it all that it counts for. topk sends them first. In randomk's pairs
  they replace what was drawn, from the first pair on, in the order of their indices, k at most. dithering with a norm
  of 0 or NaN writes no bits and draws nothing.
* What is kept for the next round (error, momentum) is 0 where it would not be finite: an overflow which a loss scaler
  skips must not come back in all later steps.
* Every NaN that is written is the quiet one, as in sums: its bits must not depend on the order of operands.
* Adding a frame to a sum of frames touches only what the frame has: -0.0 stays where nothing was sent.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from bpsfast.orchestration.codec import INT8_BLOCK, CodecSpec, count

Array = np.ndarray[Any, Any]

N_LANES = 32
_MASK = (1 << 64) - 1
_DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Generator:
    """xorshift128+ over two words of 64 bits, both *seed* at first."""

    def __init__(self, seed: int) -> None:
        self.words = [seed, seed]

    def draw(self) -> int:
        """Return the next 64 bits."""
        t, s = self.words
        t ^= t << 23 & _MASK
        t ^= t >> 17
        t ^= s ^ (s >> 26)
        self.words = [s, t]
        return t + s & _MASK

    def below(self, n: int) -> int:
        """Draw a whole number below *n*."""
        return self.draw() % n

    def bernoulli(self, chance: float) -> bool:
        """Draw true with this chance."""
        return float(self.draw()) < chance * 2.0**64


def wide_dtype(dtype: str) -> np.dtype[Any]:
    """Return T for tensors of *dtype*."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def encode(codec: CodecSpec, values: Array, generator: Generator) -> bytes:
    """Return *values*, an array of T, in the format of *codec*; *generator* moves on by the draws this takes."""
    with np.errstate(all="ignore"):
        if codec.kind == "onebit":
            return _pack(values < 0, values.itemsize) + _scale(codec, values).tobytes()
        if codec.kind in ("topk", "randomk"):
            order = _largest(codec, values) if codec.kind == "topk" else _drawn(codec, values, generator)
            index = np.dtype(f"u{values.itemsize}")
            return b"".join(index.type(i).tobytes() + _quiet(values[i : i + 1]).tobytes() for i in order)
        if codec.kind == "dithering":
            return _dither(codec, values, generator)
        if codec.kind == "int8":
            blocks = [values[i : i + INT8_BLOCK] for i in range(0, len(values), INT8_BLOCK)]
            scales = [_block_scale(block) for block in blocks]
            return b"".join(s.tobytes() for s in scales) + b"".join(map(_block_bytes, blocks, scales))
        return _quiet(values.astype(np.float32).astype(_DTYPES[codec.kind])).tobytes()


def decode(codec: CodecSpec, frame: bytes, n: int, dtype: str) -> Array:
    """Return the *n* elements of T that *frame*, made by `encode` of a tensor of *dtype*, stands for."""
    return add(codec, frame, np.zeros(n, wide_dtype(dtype)), is_first=True)


def add(codec: CodecSpec, frame: bytes, sums: Array, is_first: bool = False) -> Array:
    """Return *sums*, an array of T, with what *frame* stands for added; *is_first*: instead of them."""
    n, wide = len(sums), sums.dtype
    with np.errstate(all="ignore"):
        if codec.kind in ("topk", "randomk"):
            pairs = np.frombuffer(frame, [("index", f"u{wide.itemsize}"), ("value", wide)])
            where, values = pairs["index"], pairs["value"]
        elif codec.kind == "dithering":
            where, values = _undither(codec, frame, n, wide)
        elif codec.kind == "onebit":
            scale = np.frombuffer(frame[-4:], np.float32).astype(wide)
            where, values = np.arange(n), np.where(_unpack(frame[:-4], n, wide.itemsize), -scale, scale)
        elif codec.kind == "int8":
            scales = np.frombuffer(frame[: len(frame) - n], np.float32).astype(wide)
            numbers = np.frombuffer(frame[len(frame) - n :], np.int8).astype(wide)
            where, values = np.arange(n), numbers * np.repeat(scales, INT8_BLOCK)[:n]
        else:
            where, values = np.arange(n), np.frombuffer(frame, _DTYPES[codec.kind]).astype(wide)
        new = np.zeros(n, wide) if is_first else sums.copy()
        # a place drawn twice has the same value twice, and is assigned it twice
        new[where] = values if is_first else new[where] + values
    return _quiet(new)


class Partition:
    """One partition of one tensor on one side: what a node, or the owner, keeps from round to round."""

    def __init__(self, codec: CodecSpec, n: int, dtype: str) -> None:
        self.codec = codec
        self.dtype = dtype
        self.generator = Generator(codec.seed)
        self.error = np.zeros(n, wide_dtype(dtype))
        self.momentum = np.zeros(n, wide_dtype(dtype))

    def push(self, partial: Array, ratio: float = 1.0) -> bytes:
        """Return the frame a node makes of its *partial*, of the tensor's dtype; *ratio*: the last learning rate by
        the present one.
        """
        with np.errstate(all="ignore"):
            values = partial.astype(wide_dtype(self.dtype))
            if self.codec.momentum:
                mu = values.dtype.type(self.codec.momentum)
                momentum = mu * self.momentum + values
                values = values + mu * momentum
                self.momentum = _finite(momentum)
        return self._encode(values, ratio)

    def merge(self, frames: Sequence[bytes], divisor: float = 1.0, ratio: float = 1.0) -> bytes:
        """Return the frame the owner makes of the nodes' *frames*, in node order."""
        sums = decode(self.codec, frames[0], len(self.error), self.dtype)
        for frame in frames[1:]:
            sums = add(self.codec, frame, sums)
        if divisor != 1:
            with np.errstate(all="ignore"):
                sums = sums / sums.dtype.type(divisor)
        return self._encode(sums, ratio)

    def _encode(self, values: Array, ratio: float) -> bytes:
        if not self.codec.error_feedback:
            return encode(self.codec, _quiet(values), self.generator)
        with np.errstate(all="ignore"):
            values = _quiet(values + values.dtype.type(ratio) * self.error)
            frame = encode(self.codec, values, self.generator)
            self.error = _finite(values - decode(self.codec, frame, len(values), self.dtype))
        return frame


def publish(codec: CodecSpec, frame: bytes, n: int, dtype: str) -> Array:
    """Return what ranks get of the owner's *frame*: *n* elements of the tensor's dtype."""
    with np.errstate(all="ignore"):
        return _quiet(decode(codec, frame, n, dtype).astype(_DTYPES[dtype]))


class ReferenceJob:
    """One partition on all nodes: rounds as a job makes them, whichever node owns it."""

    def __init__(self, codec: CodecSpec, n: int, dtype: str, n_nodes: int) -> None:
        self.codec = codec
        self.nodes = [Partition(codec, n, dtype) for _ in range(n_nodes)]
        self.owner = Partition(codec, n, dtype)

    def round(self, partials: Sequence[Array | None], divisor: float = 1.0, ratio: float = 1.0) -> Array:
        """Return what all ranks get of the nodes' *partials*, one at least; a node that pushes nothing has None."""
        frames = [node.push(x, ratio) for node, x in zip(self.nodes, partials, strict=True) if x is not None]
        frame = self.owner.merge(frames, divisor, ratio)
        return publish(self.codec, frame, len(self.owner.error), self.owner.dtype)


def _quiet(values: Array) -> Array:
    """Return *values* with the quiet NaN for every NaN."""
    return np.where(np.isnan(values), values.dtype.type(np.nan), values)


def _finite(values: Array) -> Array:
    return np.where(np.isfinite(values), values, values.dtype.type(0))


def _in_lanes(terms: Array) -> float:
    """Add doubles in lanes, then the lanes."""
    lanes = np.zeros(N_LANES)
    for start in range(0, len(terms), N_LANES):
        row = terms[start : start + N_LANES]
        lanes[: len(row)] += row
    total = 0.0
    for lane in lanes:
        total += float(lane)
    return total


def _scale(codec: CodecSpec, values: Array) -> Array:
    """Return the mean magnitude as a float32, 1 for it if not scaled; of no values 0."""
    total = _in_lanes(np.abs(values.astype(np.float64)))
    if not codec.scaled:
        return _quiet(np.array([1 if np.isfinite(values).all() else total], np.float32))
    return _quiet(np.array([total / max(1, len(values))]).astype(np.float32))


def _pack(bits: Array, width: int) -> bytes:
    """Return *bits* in words of *width* bytes, the first bit the highest, zeros after the last."""
    padded = np.zeros(-(-len(bits) // (8 * width)) * 8 * width, bool)
    padded[: len(bits)] = bits
    return np.packbits(padded).view(f">u{width}").astype(f"<u{width}").tobytes()


def _unpack(words: bytes, n_bits: int, width: int) -> Array:
    return np.unpackbits(np.frombuffer(words, f"<u{width}").astype(f">u{width}").view(np.uint8))[:n_bits].astype(bool)


def _largest(codec: CodecSpec, values: Array) -> list[int]:
    bits = np.abs(_quiet(values)).view(f"i{values.itemsize}")
    by_size = sorted(range(len(values)), key=lambda i: (-int(bits[i]), i))
    return sorted(by_size[: count(codec, len(values))])


def _drawn(codec: CodecSpec, values: Array, generator: Generator) -> list[int]:
    drawn = [generator.below(len(values)) for _ in range(count(codec, len(values)) if len(values) else 0)]
    shown = np.flatnonzero(~np.isfinite(values))[: len(drawn)].tolist()
    return [*shown, *drawn[len(shown) :]]


def _levels(codec: CodecSpec) -> int:
    return 1 << (int(codec.k) - 1) if codec.natural else int(codec.k)


def _norm(codec: CodecSpec, values: Array) -> Array:
    magnitudes = np.abs(values.astype(np.float64))
    norm = math.sqrt(_in_lanes(magnitudes * magnitudes)) if codec.l2 else magnitudes.max(initial=0)
    rounded = np.array([norm]).astype(np.float32)
    return rounded if np.isfinite(rounded) else np.array([np.nan], np.float32)


def _dither(codec: CodecSpec, values: Array, generator: Generator) -> bytes:
    norm, levels = _norm(codec, values), _levels(codec)
    bits: list[int] = []
    last = -1
    for i in range(len(values) if norm > 0 else 0):
        y = abs(float(values[i])) / float(norm[0]) * levels
        if codec.natural:
            floor = _power_at_or_above(math.ceil(y)) // 2
            step = floor or 1
        else:
            floor, step = math.floor(y), 1
        q = min(levels, floor + step * generator.bernoulli((y - floor) / step))
        if q:
            bits += [*_elias(i - last), int(values[i] < 0), *_elias(q)]
            last = i
    words = _pack(np.array(bits, bool), values.itemsize)
    return words + len(bits).to_bytes(values.itemsize, "little") + norm.tobytes()


def _power_at_or_above(value: int) -> int:
    return 1 << (value - 1).bit_length() if value else 0


def _elias(value: int) -> list[int]:
    """Return the Elias delta code of *value*, 1 at least, as bits."""
    length = value.bit_length()
    length_of_length = length.bit_length() - 1
    return [*[0] * length_of_length, *_binary(length), *_binary(value)[1:]]


def _binary(value: int) -> list[int]:
    return [int(digit) for digit in f"{value:b}"]


def _undither(codec: CodecSpec, frame: bytes, n: int, wide: np.dtype[Any]) -> tuple[Array, Array]:
    norm = np.frombuffer(frame[-4:], np.float32)
    if not np.isfinite(norm[0]):
        return np.arange(n), np.full(n, np.nan, wide)
    n_bits = int.from_bytes(frame[-4 - wide.itemsize : -4], "little")
    bits = iter(_unpack(frame[: -4 - wide.itemsize], n_bits, wide.itemsize).astype(int).tolist())
    where, values = [], []
    last, left = -1, n_bits
    while left:
        gap = _take_elias(bits)
        sign = next(bits)
        q = _take_elias(bits)
        left -= len(_elias(gap)) + 1 + len(_elias(q))
        last += gap
        where.append(last)
        values.append((-1 if sign else 1) * q * float(norm[0]) / _levels(codec))
    return np.array(where, int), np.array(values, np.float64).astype(wide)


def _take_elias(bits: Any) -> int:
    n_zeros = 0
    while not next(bits):
        n_zeros += 1
    length = _number(1, bits, n_zeros)
    return _number(1, bits, length - 1)


def _number(head: int, bits: Any, n_more: int) -> int:
    for _ in range(n_more):
        head = 2 * head + next(bits)
    return head


def _block_scale(block: Array) -> Array:
    scale = (np.abs(block).max() / block.dtype.type(127)).astype(np.float32)
    return scale if np.isfinite(scale) else np.float32(np.nan)


def _block_bytes(block: Array, scale: Array) -> bytes:
    if not scale > 0:
        return bytes(len(block))
    return np.clip(np.rint(block / block.dtype.type(scale)), -127, 127).astype(np.int8).tobytes()
