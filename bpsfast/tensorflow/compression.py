"""Compression of TensorFlow's tensors: codecs, which run in the nodes (`bpsfast.compression.choice`), and compressors,
which run in the ranks.

A compressor is a class (or an object) with two functions, as in BytePS; derive your own from `Compressor`. Its output
is summed as it is, so compress should be linear, and the output's shape and dtype must depend on the tensor's alone.
"""
from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..compression import compressors
from ..compression.choice import Choice
from ..compression.compressors import (
    CastingCompressor,
    Codecs,
    CompressionLike,
    Compressor,
    CompressorLike,
    NoneCompressor,
)

__all__ = ["BF16Compressor", "Compression", "CompressionLike", "Compressor", "CompressorLike", "FP16Compressor",
           "NoneCompressor", "parted"]


class _Casting(CastingCompressor):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)

    @classmethod
    def wire_dtype(cls, dtype: Any) -> Any:
        return cls.narrow if dtype.is_floating and dtype.size > cls.narrow.size else dtype


class FP16Compressor(_Casting):
    """Floating-point tensors travel as float16."""

    wire_name = "float16"
    narrow = tf.float16


class BF16Compressor(_Casting):
    """Floating-point tensors travel as bfloat16."""

    wire_name = "bfloat16"
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
