"""Compression of Keras's gradients: what travels instead of a tensor, and how the tensor is made of the sum of that.

As in `bpsfast.torch.compression`, but for the tensors of every backend, inside its compiled programs: a compressor is a
class (or an object) with the functions compress and decompress, written with `keras.ops`; codecs are the nodes'.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import keras

from ..compression import CodecSpec, formats, from_byteps
from ..compression.choice import Choice, check_choice
from ..orchestration.errors import ConfigError


class Compressor:
    """Leaves everything as it is: what other compressors derive from."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what travels, a dense tensor, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the tensor whose shape and dtype are those before `compress`; *tensor* is the sum."""
        return tensor


class NoneCompressor(Compressor):
    """Leaves everything as it is."""


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


class Compression:
    """The compressors to choose from, and the codecs (see `bpsfast.compression`)."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    onebit = staticmethod(formats.onebit)
    topk = staticmethod(formats.topk)
    randomk = staticmethod(formats.randomk)
    dithering = staticmethod(formats.dithering)
    float16 = staticmethod(formats.float16)
    bfloat16 = staticmethod(formats.bfloat16)
    int8 = staticmethod(formats.int8)
    where_it_pays = staticmethod(formats.where_it_pays)
    from_byteps = staticmethod(from_byteps)


#: A compressor: a class, as in BytePS, or an object of one.
CompressorLike: TypeAlias = type[Compressor] | Compressor
#: What may be given as *compression*.
CompressionLike: TypeAlias = CompressorLike | Choice | None


def parted(compression: Any) -> tuple[CompressorLike, Choice | None]:
    """Return the compressor, and the choice of codecs, that *compression* is: one of them, and none of the other.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    if compression is None:
        return NoneCompressor, None
    halves = [callable(getattr(compression, half, None)) for half in ("compress", "decompress")]
    if all(halves):
        return compression, None
    if any(halves) or isinstance(compression, type) or not (
            isinstance(compression, CodecSpec | Mapping) or callable(compression)):
        raise ConfigError(f"compression={compression!r} is no codec, and has no functions compress and decompress: use "
                          "Compression.none, .fp16, .bf16, a class derived from bpsfast.keras.Compressor, a codec such "
                          "as Compression.onebit(), or a mapping of paths of variables to codecs")
    check_choice(compression)
    return NoneCompressor, compression
