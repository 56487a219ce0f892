"""Compression of TensorFlow's tensors: codecs, which are the nodes' (`bpsfast.compression.choice`), and compressors,
which run in the ranks: what they make is summed as it is.

A compressor is a class (or an object) with two functions, as in BytePS; derive from `Compressor` for one of your own.
What travels is summed, so compress should be linear; its shape and dtype depend on those of the tensor alone.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import tensorflow as tf

from ..compression import CodecSpec, formats, from_byteps
from ..compression.choice import Choice, check_choice
from ..orchestration.errors import ConfigError


class Compressor:
    """Leaves everything as it is: what other compressors derive from."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what travels, a dense tensor, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor whose shape is that before `compress`, of the sum."""
        return tensor


class NoneCompressor(Compressor):
    """Leaves everything as it is."""


class _Narrowing(Compressor):
    """Lets wide floating-point tensors travel as `narrow`; others stay as they are."""

    narrow: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return *tensor* in the dtype that travels, and its own dtype."""
        is_wide = tensor.dtype.is_floating and tensor.dtype.size > cls.narrow.size
        return tf.cast(tensor, cls.narrow) if is_wide else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return *tensor* in the dtype it had before `compress`."""
        return tf.cast(tensor, ctx)


class FP16Compressor(_Narrowing):
    """Floating-point tensors travel as float16."""

    narrow = tf.float16


class BF16Compressor(_Narrowing):
    """Floating-point tensors travel as bfloat16."""

    narrow = tf.bfloat16


class Compression:
    """The compressors to choose from, and the codecs (see `bpsfast.compression`).

    Sums of what compressors make are made in float32 and rounded once to the travelling dtype.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    onebit = staticmethod(formats.onebit)
    topk = staticmethod(formats.topk)
    randomk = staticmethod(formats.randomk)
    dithering = staticmethod(formats.dithering)
    float16 = staticmethod(formats.float16)
    bfloat16 = staticmethod(formats.bfloat16)
    int8 = staticmethod(formats.int8)
    where_it_pays = staticmethod(formats.where_it_pays)
    from_byteps = staticmethod(from_byteps)


#: A compressor: a class, as in BytePS, or an object of one.
CompressorLike: TypeAlias = type[Compressor] | Compressor
#: What may be given as *compression*.
CompressionLike: TypeAlias = CompressorLike | Choice


def parted(compression: Any) -> tuple[CompressorLike, Choice | None]:
    """Return the compressor, and the choice of codecs, that *compression* is: one of them, and none of the other.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    if compression is None:
        return NoneCompressor, None
    halves = [callable(getattr(compression, name, None)) for name in ("compress", "decompress")]
    if all(halves):
        return compression, None
    is_choice = isinstance(compression, CodecSpec | Mapping) or callable(compression)
    if isinstance(compression, type) or any(halves) or not is_choice:
        raise ConfigError(f"compression={compression!r} is no codec, and has no functions compress and decompress: use "
                          "Compression.none, .fp16, .bf16, a class derived from bpsfast.tensorflow.Compressor, a codec "
                          "such as Compression.onebit(), or a mapping of names to codecs")
    check_choice(compression)
    return NoneCompressor, compression
