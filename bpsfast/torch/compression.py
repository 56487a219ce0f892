"""Compression of torch tensors: what travels instead of a tensor, and how the tensor is made of the sum of that.

There are two kinds. Codecs (`Compression.onebit()` and the like, or a mapping or function that chooses one by the name:
`bpsfast.compression.choice`) are the nodes': they decode what they sum, and code what travels between them.

The other kind runs in the ranks, and what it makes is summed as it is. Such a compressor is a class (or an object) with
two functions, as in BytePS; derive from `Compressor` for one of your own:

    class Scaled(bps.Compressor):
        @staticmethod
        def compress(tensor):                 # -> what travels, and what decompress needs
            return (tensor * 1024).half(), tensor.dtype

        @staticmethod
        def decompress(tensor, context):      # the sum (mean) of what all ranks sent
            return tensor.to(context) / 1024

What travels is summed, so compress should be linear; its shape and dtype depend on those of the tensor alone.
"""
from __future__ import annotations

from typing import Any

import torch

from ..compression import compressors
from ..compression.choice import Choice
from ..compression.compressors import (
    CastingCompressor,
    Codecs,
    CompressionLike,
    Compressor,
    CompressorLike,
    NoneCompressor,
    is_compressor,
)
from ..orchestration.errors import ConfigError

__all__ = ["BF16Compressor", "Compression", "CompressionLike", "Compressor", "CompressorLike", "FP16Compressor",
           "NoneCompressor", "cast_dtype", "check_compression", "check_compressor", "parted"]


class _Casting(CastingCompressor):
    narrow: torch.dtype

    @staticmethod
    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)

    @classmethod
    def wire_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        return cls.narrow if dtype.is_floating_point and dtype.itemsize > cls.narrow.itemsize else dtype


class FP16Compressor(_Casting):
    """Floating-point tensors travel as float16."""

    wire_name = "float16"
    narrow = torch.float16


class BF16Compressor(_Casting):
    """Floating-point tensors travel as bfloat16."""

    wire_name = "bfloat16"
    narrow = torch.bfloat16


class Compression(Codecs):
    """The compressors to choose from, and the codecs (see `bpsfast.compression`).

    Sums of what compressors make are made in float32 and rounded once to the travelling dtype.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def check_compression(compression: Any) -> None:
    """Raise `ConfigError` if *compression* is neither a compressor nor a choice of codecs."""
    parted(compression)


def check_compressor(compression: Any) -> None:
    """Raise `ConfigError` if *compression* is no compressor."""
    if not is_compressor(compression):
        raise ConfigError(f"compression={compression!r} has no functions compress and decompress: use "
                          "Compression.none, .fp16, .bf16, or a class derived from bpsfast.torch.Compressor")


def parted(compression: Any) -> tuple[CompressorLike, Choice | None]:
    """As `compressors.parted`."""
    return compressors.parted(compression, "bpsfast.torch")


def cast_dtype(compression: Any, dtype: torch.dtype) -> torch.dtype | None:
    """Return in which dtype tensors of *dtype* travel if *compression* only casts, which copies do on the way.

    None: it is code of the user's, to be called.
    """
    if compression is Compressor or compression is NoneCompressor:
        return dtype
    if compression is FP16Compressor or compression is BF16Compressor:
        wire: torch.dtype = compression.wire_dtype(dtype)
        return wire
    return None
