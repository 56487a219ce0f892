"""Compression of what travels: floating-point tensors as float16."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


class NoneCompressor:
    """Leave tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return *tensor* as it was before `compress`."""
        return tensor


class FP16Compressor:
    """Floating-point tensors of any width travel as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels, and what `decompress` needs."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return *tensor* in the dtype that it had before `compress`."""
        return tensor.to(ctx)


class Compression:
    """The compressors to choose from; any class with their two static methods does."""

    none = NoneCompressor
    fp16 = FP16Compressor


def compressed(tensors: Sequence[Any], compression: Any) -> tuple[list[Any], list[Callable[[Any], Any]]]:
    """Return what travels of *tensors*, and for each what makes the result of it. NumPy arrays travel as they are."""
    narrow: list[Any] = list(tensors)
    back: list[Callable[[Any], Any]] = [_same] * len(tensors)
    for i, tensor in enumerate(tensors):
        if compression is not Compression.none and isinstance(tensor, torch.Tensor):
            narrow[i], context = compression.compress(tensor)
            back[i] = partial(_decompressed, compression, context)
    return narrow, back


def _decompressed(compression: Any, context: Any, tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = compression.decompress(tensor, context)
    return found


def _same(tensor: Any) -> Any:
    return tensor
