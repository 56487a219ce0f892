"""Compressors for torch tensors, which run in the ranks, and the codecs of `bpsfast.compression`, which run in nodes.

Codecs (`Compression.onebit()` and the like, or a mapping or function that chooses one by name:
`bpsfast.compression.choice`) compress what travels between nodes; a node decodes it before it sums.

A compressor compresses in the rank, and the compressed tensors are summed as they are. It is a class (or an object)
with two functions, as in BytePS; derive your own from `Compressor`:

    class Scaled(bps.Compressor):
        @staticmethod
        def compress(tensor):                 # returns the tensor that is sent, and the context of decompress
            return (tensor * 1024).half(), tensor.dtype

        @staticmethod
        def decompress(tensor, context):      # the sum (mean) of what all ranks sent
            return tensor.to(context) / 1024

So compress should be linear; the shape and dtype of its result depend on those of the tensor alone.
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

    Compressed tensors are summed in float32; the sum is rounded once to the dtype that is sent.
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
    """Return the dtype in which tensors of *dtype* are sent if *compression* only casts, as copies do for free.

    None: it is a compressor of the user's, to be called.
    """
    if compression in (Compressor, NoneCompressor):
        return dtype
    wire: torch.dtype | None = None
    if compression in (FP16Compressor, BF16Compressor):
        wire = compression.wire_dtype(dtype)
    return wire
