"""Compression of what travels between nodes: what users choose, and the codecs that do it.

    bpsfast.push_pull(x, name="x", compression=bpsfast.compression.topk(0.01, error_feedback=True))

A codec is chosen tensor by tensor (`choice`); formats and arithmetic are BytePS's. Ranks load neither NumPy nor a
compiler for it: kernels are the nodes'.
"""
from __future__ import annotations

from ..orchestration.codec import CodecSpec
from .byteps_keywords import from_byteps
from .choice import Choice, check_choice, chosen
from .formats import bfloat16, dithering, float16, int8, onebit, randomk, topk, where_it_pays

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
