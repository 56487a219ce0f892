"""Compression of Keras's gradients: what travels instead of a tensor, and how the tensor is made of the sum of that.

As in `bpsfast.torch.compression`, but for the tensors of every backend, inside its compiled programs: a compressor is a
class (or an object) with the functions compress and decompress, written with `keras.ops`; codecs are the nodes'.
"""
from __future__ import annotations

from typing import Any

import keras

from ..compression import compressors
from ..compression.choice import Choice
from ..compression.compressors import Codecs, CompressionLike, Compressor, CompressorLike, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "CompressionLike", "Compressor", "CompressorLike", "FP16Compressor",
           "NoneCompressor", "parted"]


class _Narrowing(Compressor):
    """Lets wide floating-point tensors travel as `narrow`; others stay as they are."""

    narrow = ""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return *tensor* in the dtype that travels, and its own dtype."""
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return (keras.ops.cast(tensor, cls.narrow) if dtype in ("float32", "float64") else tensor), dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return *tensor* in the dtype it had before `compress`."""
        return keras.ops.cast(tensor, context)


class FP16Compressor(_Narrowing):
    """Floating-point tensors travel as float16."""

    narrow = "float16"


class BF16Compressor(_Narrowing):
    """Floating-point tensors travel as bfloat16."""

    narrow = "bfloat16"


class Compression(Codecs):
    """The compressors to choose from, and the codecs (see `bpsfast.compression`)."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def parted(compression: Any) -> tuple[CompressorLike, Choice | None]:
    """As `compressors.parted`."""
    return compressors.parted(compression, "bpsfast.keras", "paths of variables")
