"""Compression of TensorFlow's tensors: codecs, which are the nodes' (`bpsfast.compression.choice`), and compressors,
which run in the ranks: what they make is summed as it is.

A compressor is a class (or an object) with two functions, as in BytePS; derive from `Compressor` for one of your own.
What travels is summed, so compress should be linear; its shape and dtype depend on those of the tensor alone.
"""
from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..compression import compressors
from ..compression.choice import Choice
from ..compression.compressors import Codecs, CompressionLike, Compressor, CompressorLike, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "CompressionLike", "Compressor", "CompressorLike", "FP16Compressor",
           "NoneCompressor", "parted"]


class _Narrowing(Compressor):
    """Lets wide floating-point tensors travel as `narrow`; others stay as they are."""

    narrow: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return *tensor* in the dtype that travels, and its own dtype."""
        is_wide = tensor.dtype.is_floating and tensor.dtype.size > cls.narrow.size
        return tf.cast(tensor, cls.narrow) if is_wide else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return *tensor* in the dtype it had before `compress`."""
        return tf.cast(tensor, context)


class FP16Compressor(_Narrowing):
    """Floating-point tensors travel as float16."""

    narrow = tf.float16


class BF16Compressor(_Narrowing):
    """Floating-point tensors travel as bfloat16."""

    narrow = tf.bfloat16


class Compression(Codecs):
    """The compressors to choose from, and the codecs (see `bpsfast.compression`).

    Sums of what compressors make are made in float32 and rounded once to the travelling dtype.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def parted(compression: Any) -> tuple[CompressorLike, Choice | None]:
    """As `compressors.parted`."""
    return compressors.parted(compression, "bpsfast.tensorflow")
