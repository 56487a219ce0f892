"""Compressors: functions that ranks call to compress a tensor before it is summed, for every framework.

A compressor is a class or an object with two functions, as in BytePS. The compressed tensors are summed, so `compress`
should be linear, and its result's shape and dtype must depend only on those of the tensor. Nodes use codecs instead
(`choice`).
"""
from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, TypeAlias

from ..orchestration.errors import ConfigError
from . import formats
from .choice import Choice, check_choice
from .formats import CodecSpec, from_byteps


class Compressor:
    """The base of compressors; it changes nothing."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the compressed tensor, which is dense, and the context for `decompress`. Must not change *tensor*."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the sum *tensor* in the shape before `compress`. May change and return *tensor*."""
        return tensor


class NoneCompressor(Compressor):
    """Changes nothing."""


class CastingCompressor(Compressor, abc.ABC):
    """Sends floating-point tensors that are wider than `narrow` in that dtype; other tensors stay as they are.

    The base of each framework's FP16Compressor and BF16Compressor, which say how that framework casts.
    """

    #: The dtype that travels: its name, and the framework's object for it.
    wire_name = ""
    narrow: Any = None

    @staticmethod
    def dtype_of(tensor: Any) -> Any:
        """Return the dtype of *tensor*."""
        return tensor.dtype

    @staticmethod
    @abc.abstractmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return *tensor* as *dtype*."""

    @classmethod
    @abc.abstractmethod
    def wire_dtype(cls, dtype: Any) -> Any:
        """Return the dtype in which tensors of *dtype* travel."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return *tensor* in the dtype that travels, and its own dtype."""
        dtype = cls.dtype_of(tensor)
        wire = cls.wire_dtype(dtype)
        return tensor if wire == dtype else cls.cast(tensor, wire), dtype

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:  # type: ignore[override]  # a static method's caller sees none
        """Return *tensor* in the dtype it had before `compress`."""
        return cls.cast(tensor, context)


class Codecs:
    """The codecs (see `bpsfast.compression`) as attributes of each framework's `Compression`."""

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
#: The type of the argument *compression*.
CompressionLike: TypeAlias = CompressorLike | Choice | None


def is_compressor(compression: Any) -> bool:
    """Whether *compression* has both functions."""
    return all(callable(getattr(compression, half, None)) for half in ("compress", "decompress"))


def parted(compression: Any, module: str, names: str = "names") -> tuple[CompressorLike, Choice | None]:
    """Return the compressor and the choice of codecs of *compression*, which is one of the two.

    *module*, which has a `Compressor`, and *names*, by which codecs are chosen, are for the error's text.

    Raises
    ------
    ConfigError
        It is neither.
    """
    if is_compressor(compression):
        return compression, None
    if compression is None:
        return NoneCompressor, None
    is_half = isinstance(compression, type) or hasattr(compression, "compress") or hasattr(compression, "decompress")
    if is_half or not (isinstance(compression, CodecSpec | Mapping) or callable(compression)):
        raise ConfigError(f"compression={compression!r} is no codec, and has no functions compress and decompress: use "
                          f"Compression.none, .fp16, .bf16, a class derived from {module}.Compressor, a codec such "
                          f"as Compression.onebit(), or a mapping of {names} to codecs")
    check_choice(compression)
    return NoneCompressor, compression
