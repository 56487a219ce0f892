"""Describes the formats and the arithmetic of all compression codecs, and has them in NumPy as the reference of tests.

It shares no code with the kernels. `bpsfast.base.reference_sum` is the oracle of sums.

T: the type in which a partition is compressed, float32, for float64 tensors float64. I: the unsigned integer of the
same width, w bits. n: the elements of a partition. All numbers are little endian. A frame is a length and the result
of `encode`.

* onebit: a bit for each x, 1 if x < 0, w bits in an I, the highest first, zeros after the last; then a float32 scale:
  the mean |x|, or 1 if not scaled. Decoded: scale, or -scale where the bit is 1.
* topk: pairs (I index, T value) of the k largest |x|. Decoded: these, and 0 for the others.
* randomk: such pairs of k draws below n, which may repeat.
* dithering: norm = the largest |x|, or the Euclidean norm. Linear: y = |x| / norm * s, q = floor(y) + (draw < y -
  floor(y)). Natural: y = |x| / norm * 2^(s-1), f = (the power of two at or above ceil(y)) / 2 in whole numbers, l = f
  or 1 if f is 0, q = f + l * (draw < (y - f) / l). Bits of every x with q > 0: Elias delta code of the distance from
  the one before (the first: from -1), a sign, Elias delta code of q; in Is, the highest bit first, zeros after the
  last; then an I: the number of bits; a float32: the norm. Decoded: sign * q * norm / s, or / 2^(s-1).
* float16, bfloat16: x rounded to nearest even; a float64 is rounded to float32 first.
* int8: of each block of 256 a float32 scale = max |x| / 127; then for each x a byte, rint(x / scale), 0 if scale is 0.

The first four are BytePS's, with these differences:

* T is never 16 bits wide, since indices of 16 bits end at 65536. Such tensors are widened, which is exact.
* Pairs of topk are in the order of their indices (BytePS: of a heap, which would be part of the format). The largest
  are by the bits of |x|, of equal ones the first; NaN is the largest, so it is sent. k is at most n/2.
* Sums of magnitudes or squares are sums of doubles in `N_COLUMNS` columns, with element i in column i mod `N_COLUMNS`;
  the columns are then added in order. They are so the same on any CPU; 32 columns suit all vector units.
* dithering divides by the norm that is sent, a float32, so that both ends have the same levels. It calculates in
  doubles and rounds to T at the end. q is at most the highest level, as rounding the norm can make y larger than s.
* NaN and infinity stay visible: one of them in x makes onebit's scale NaN or infinite, scaled or not, and dithering's
  norm or int8's scale NaN, and with it all elements that use it. topk sends them first. In randomk's pairs they replace
  drawn elements, from the first pair on, in the order of their indices, at most k. dithering with a norm of 0 or NaN
  writes no bits and draws nothing.
* State for the next round (error, momentum) is 0 where it would not be finite, so that an overflow that a loss scaler
  skips does not return in later steps.
* Every written NaN is the quiet NaN, as in sums, so that its bits do not depend on the order of operands.
* Adding a frame to a sum changes only the elements that the frame has, so that -0.0 stays where nothing was sent.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from bpsfast.orchestration.codec import INT8_BLOCK, CodecSpec, count

Array = np.ndarray[Any, Any]

N_COLUMNS = 32
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
        """Draw an integer below *n*."""
        return self.draw() % n

    def bernoulli(self, chance: float) -> bool:
        """Draw true with the probability *chance*."""
        return float(self.draw()) < chance * 2.0**64


def wide_dtype(dtype: str) -> np.dtype[Any]:
    """Return T for tensors of *dtype*."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def encode(codec: CodecSpec, values: Array, generator: Generator) -> bytes:
    """Return *values*, an array of T, in the format of *codec*, with random draws from *generator*."""
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
    """Return the *n* elements of T of *frame*, which `encode` made of a tensor of *dtype*."""
    return add(codec, frame, np.zeros(n, wide_dtype(dtype)), is_first=True)


def add(codec: CodecSpec, frame: bytes, sums: Array, is_first: bool = False) -> Array:
    """Return *sums*, an array of T, plus the elements of *frame*; *is_first*: those elements alone."""
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


class PartitionState:
    """The state of one partition of a tensor on a node, or on the owner, from round to round."""

    def __init__(self, codec: CodecSpec, n: int, dtype: str) -> None:
        self.codec = codec
        self.dtype = dtype
        self.generator = Generator(codec.seed)
        self.error = np.zeros(n, wide_dtype(dtype))
        self.momentum = np.zeros(n, wide_dtype(dtype))

    def push(self, partial: Array, ratio: float = 1.0) -> bytes:
        """Return a node's frame of its *partial*, of the tensor's dtype; *ratio*: last learning rate / present one."""
        with np.errstate(all="ignore"):
            values = partial.astype(wide_dtype(self.dtype))
            if self.codec.momentum:
                mu = values.dtype.type(self.codec.momentum)
                momentum = mu * self.momentum + values
                values = values + mu * momentum
                self.momentum = _finite(momentum)
        return self._encode(values, ratio)

    def merge(self, frames: Sequence[bytes], divisor: float = 1.0, ratio: float = 1.0) -> bytes:
        """Return the owner's frame of the sum of the nodes' *frames*, in node order."""
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
    """Return the *n* elements of the tensor's dtype that ranks get from the owner's *frame*."""
    with np.errstate(all="ignore"):
        return _quiet(decode(codec, frame, n, dtype).astype(_DTYPES[dtype]))


class ReferenceJob:
    """One partition on all nodes: the rounds of a job, whichever node owns it."""

    def __init__(self, codec: CodecSpec, n: int, dtype: str, n_nodes: int) -> None:
        self.codec = codec
        self.nodes = [PartitionState(codec, n, dtype) for _ in range(n_nodes)]
        self.owner = PartitionState(codec, n, dtype)

    def round(self, partials: Sequence[Array | None], divisor: float = 1.0, ratio: float = 1.0) -> Array:
        """Return the result for all ranks of the nodes' *partials*, at least one; None: a node pushes nothing."""
        frames = [node.push(x, ratio) for node, x in zip(self.nodes, partials, strict=True) if x is not None]
        frame = self.owner.merge(frames, divisor, ratio)
        return publish(self.codec, frame, len(self.owner.error), self.owner.dtype)


def _quiet(values: Array) -> Array:
    """Return *values* with every NaN as the quiet NaN."""
    return np.where(np.isnan(values), values.dtype.type(np.nan), values)


def _finite(values: Array) -> Array:
    return np.where(np.isfinite(values), values, values.dtype.type(0))


def _in_columns(terms: Array) -> float:
    """Add doubles in columns, then the columns."""
    columns = np.zeros(N_COLUMNS)
    for start in range(0, len(terms), N_COLUMNS):
        row = terms[start : start + N_COLUMNS]
        columns[: len(row)] += row
    total = 0.0
    for column in columns:
        total += float(column)
    return total


def _scale(codec: CodecSpec, values: Array) -> Array:
    """Return the scale as a float32: the mean magnitude (0 of no values), or 1 if not scaled."""
    total = _in_columns(np.abs(values.astype(np.float64)))
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
    norm = math.sqrt(_in_columns(magnitudes * magnitudes)) if codec.l2 else magnitudes.max(initial=0)
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
    """Return the Elias delta code of *value* >= 1 as bits."""
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
