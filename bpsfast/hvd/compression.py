"""What travels of tensors, and what the results are made of: by compressors of `bpsfast.torch`, or the user's own."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..torch.compression import Compression as Compression, check_compressor


def compressed(tensors: Sequence[Any], compression: Any) -> tuple[list[Any], list[Callable[[Any], Any]]]:
    """Return what travels of *tensors*, and for each what makes the result of it. NumPy arrays travel as they are.

    Raises `ConfigError` if *compression* is no compressor; codecs are `DistributedOptimizer`'s.
    """
    check_compressor(compression)
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
