"""What the engine is told of a compressed partition: its kernels, and where its frames and its state lie."""
from __future__ import annotations

from typing import NamedTuple

from ..orchestration import codec
from ..orchestration.codec import CodecSpec
from ..orchestration.placement.partition import ITEM_NBYTES


class PartCodec(NamedTuple):
    """One partition's codec; addresses, and 0 for what there is not. `pyx/codec.h` says what each is for.

    `width`: bytes of an element while it is compressed. `frame`: where a member's partial is encoded. `frames`: of the
    results by parity. `results`: where a member decodes them. `error`, `momentum`, `error_back`: states, which have as
    many elements.
    """

    encode: int
    decode: int
    feed: int
    feed_back: int
    divide: int
    narrow: int
    width: int
    room_nbytes: int
    scratch_nbytes: int
    k: int
    flags: int
    mu: float
    seed: int
    frame: int = 0
    frames: tuple[int, int] = (0, 0)
    results: tuple[int, int] = (0, 0)
    error: int = 0
    momentum: int = 0
    error_back: int = 0


def part_codec(spec: CodecSpec, dtype: str, n_elements: int) -> PartCodec:
    """Return the codec of a partition of *n_elements* of *dtype*, without memory. Compiles its kernels if need be."""
    from ..kernels.codecs import codec_kernels

    width = codec.width_of(dtype)
    at = codec_kernels.addresses(spec, dtype)
    return PartCodec(
        encode=at.encode, decode=at.decode, feed=at.feed, feed_back=at.feed_wide, divide=at.divide,
        narrow=at.narrow if width != ITEM_NBYTES[dtype] else 0, width=width,
        room_nbytes=codec.frame_nbytes(spec, n_elements, dtype), k=codec.count(spec, n_elements),
        scratch_nbytes=codec_kernels.scratch_nbytes(spec, n_elements, dtype), flags=codec.flags_of(spec),
        mu=spec.momentum, seed=spec.seed)
