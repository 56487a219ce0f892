"""Compression of gradients between nodes: the choice of a codec for each tensor.

    bpsfast.push_pull(x, name="x", compression=bpsfast.compression.topk(0.01, error_feedback=True))

    formats       the codecs, by functions and by BytePS's keywords
    choice        which tensor uses which codec
    compressors   compression by the ranks, as classes

Formats and arithmetic are BytePS's. The nodes compress, with `kernels.codecs`; ranks load no compiler for it.
docs/design/compression.md has the reasons.
"""
from __future__ import annotations

from ..orchestration.codec import CodecSpec
from .choice import Choice, check_choice, chosen
from .formats import bfloat16, dithering, float16, from_byteps, int8, onebit, randomk, topk, where_it_pays

__all__ = [
    "Choice",
    "CodecSpec",
    "bfloat16",
    "check_choice",
    "chosen",
    "dithering",
    "float16",
    "from_byteps",
    "int8",
    "onebit",
    "randomk",
    "topk",
    "where_it_pays",
]
