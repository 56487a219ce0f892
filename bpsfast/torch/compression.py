"""Compression of torch tensors: travel in a narrower floating-point dtype, come back in the own one."""
from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Leave everything as it is; the others derive from this. `narrow` is the dtype that travels, None: the own one."""

    narrow: torch.dtype | None = None

    @classmethod
    def wire_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which tensors of *dtype* travel: only wider floating-point ones change."""
        if cls.narrow is None or not dtype.is_floating_point or dtype.itemsize <= cls.narrow.itemsize:
            return dtype
        return cls.narrow

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels, and what `decompress` needs."""
        return tensor.to(cls.wire_dtype(tensor.dtype)), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return *tensor* in the dtype it had before `compress`."""
        return tensor.to(context)


class _Float16(Compressor):
    narrow = torch.float16


class _BFloat16(Compressor):
    narrow = torch.bfloat16


class Compression:
    """The compressors to choose from. Sums are made in float32 and rounded once to the travelling dtype."""

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
