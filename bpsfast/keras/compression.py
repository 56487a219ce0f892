"""Compressors and codecs for Keras's gradients, on every backend and inside its compiled programs.

See `bpsfast.compression.compressors` (here the functions use `keras.ops`) and `bpsfast.compression.choice`.
"""
from __future__ import annotations

from functools import partial
from typing import Any

import keras

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
    def dtype_of(tensor: Any) -> str:
        name: str = keras.backend.standardize_dtype(tensor.dtype)
        return name

    @staticmethod
    def cast(tensor: Any, dtype: str) -> Any:
        return keras.ops.cast(tensor, dtype)

    @classmethod
    def wire_dtype(cls, dtype: str) -> str:
        return cls.wire_name if dtype in ("float32", "float64") else dtype


class FP16Compressor(_Casting):
    """Sends floating-point tensors as float16."""

    wire_name = "float16"


class BF16Compressor(_Casting):
    """Sends floating-point tensors as bfloat16."""

    wire_name = "bfloat16"


class Compression(Codecs):
    """The compressors to choose from, and the codecs (see `bpsfast.compression`)."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


parted = partial(compressors.parted, module="bpsfast.keras", names="paths of variables")
