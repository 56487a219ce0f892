"""Compressors and codecs for TensorFlow's tensors (`bpsfast.compression.compressors`, `bpsfast.compression.choice`)."""
from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf

from ..compression import compressors
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
    """Sends floating-point tensors as float16."""

    wire_name = "float16"
    narrow = tf.float16


class BF16Compressor(_Casting):
    """Sends floating-point tensors as bfloat16."""

    wire_name = "bfloat16"
    narrow = tf.bfloat16


class Compression(Codecs):
    """The compressors to choose from, and the codecs (see `bpsfast.compression`).

    Compressed tensors are summed in float32, and the sum is rounded once to their dtype.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


parted = partial(compressors.parted, module="bpsfast.tensorflow")
