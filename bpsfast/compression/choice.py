"""Chooses the codec of each tensor: one codec for all, codecs by patterns of names, or a function.

    compression=onebit()                                    all floating-point tensors that are large enough
    compression={"*.bias": None, "fc*": topk(0.01), "*": onebit()}     the first matching pattern (`fnmatch`)
    compression=lambda name, shape, dtype: topk(0.01) if len(shape) > 1 else None

A choice for many tensors (one codec, a pattern with wildcards) ignores tensors that cannot be compressed, such as
integers. A choice for one tensor, by its name or by a function, raises an error for them.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeAlias

from ..orchestration.codec import CodecSpec, check, width_of
from ..orchestration.errors import ConfigError, UnsupportedError
from ..orchestration.placement.partition import ITEM_NBYTES
from . import formats
from .formats import check_types, from_byteps

#: The type of *compression*. A function is called with name, shape and the dtype's name, such as "float32", more than
#: once for a tensor, and must always return the same, on all ranks.
Choice: TypeAlias = (
    CodecSpec | Mapping[str, CodecSpec | None] | Callable[[str, tuple[int, ...], str], CodecSpec | None])

_CODEC_FUNCTIONS = (formats.onebit, formats.topk, formats.randomk, formats.dithering, formats.float16, formats.bfloat16,
                    formats.int8, formats.where_it_pays, from_byteps)


def check_choice(choice: Choice | None) -> None:
    """Raise `ConfigError` if *choice* is invalid. Functions are not called."""
    if choice is None or isinstance(choice, CodecSpec):
        _check(choice, "compression")
    elif isinstance(choice, Mapping):
        for pattern, codec in choice.items():
            if not isinstance(pattern, str):
                raise ConfigError(f"compression has the key {pattern!r}: expected a name, or a pattern of names")
            _check(codec, f"compression[{pattern!r}]")
    elif not callable(choice):
        raise ConfigError(f"compression={choice!r} is not a choice: expected a codec such as "
                          "bpsfast.compression.onebit(), a mapping of names to codecs, or a function of name, shape "
                          "and dtype that returns one")
    elif choice in _CODEC_FUNCTIONS:  # Compression.fp16 has no parentheses, so they are easily forgotten here
        raise ConfigError(f"compression is the function {choice.__name__} itself: call it, as in "
                          f"bpsfast.compression.{choice.__name__}(...)")


def chosen(choice: Choice | None, name: str, shape: tuple[int, ...], dtype: str, least_nbytes: int,
           is_alone: bool = False) -> CodecSpec | None:
    """Return the codec that *choice* has for tensor *name*, None for none.

    Parameters
    ----------
    dtype
        The dtype's name, such as "float32".
    least_nbytes
        Smaller tensors are not compressed, whatever is chosen.
    is_alone
        *choice* is for this tensor only, so that a single codec is meant for it.

    Raises
    ------
    ConfigError
        *choice* is invalid.
    UnsupportedError
        *choice* is for this tensor only, and tensors of *dtype* cannot be compressed.
    """
    check_choice(choice)
    return _chosen(choice, name, shape, dtype, least_nbytes, is_alone)


def chosen_among(choice: Choice | None, kinds: Mapping[str, tuple[tuple[int, ...], str]],
                 least_nbytes: int, is_alone: bool = False) -> dict[str, CodecSpec]:
    """Return the codecs of the tensors that *choice* compresses; *kinds*: shapes and dtypes by name.

    *is_alone* and errors: see `chosen`.
    """
    check_choice(choice)
    return {name: codec for name, (shape, dtype) in kinds.items()
            if (codec := _chosen(choice, name, shape, dtype, least_nbytes, is_alone)) is not None}


def _chosen(choice: Choice | None, name: str, shape: tuple[int, ...], dtype: str, least_nbytes: int,
            is_alone: bool) -> CodecSpec | None:
    codec, is_meant = _found(choice, name, shape, dtype)
    if codec is None:
        return None
    if is_meant or is_alone:
        try:
            width_of(dtype)
        except UnsupportedError as exc:
            raise UnsupportedError(f"compression {codec.kind!r} was chosen for tensor {name!r}: {exc}") from None
    nbytes = prod(shape) * ITEM_NBYTES.get(dtype, 0)
    return codec if "float" in dtype and nbytes >= max(least_nbytes, 1) else None


def _found(choice: Choice | None, name: str, shape: tuple[int, ...], dtype: str) -> tuple[CodecSpec | None, bool]:
    """Return the codec for tensor *name*, and whether it is meant for this tensor only."""
    if choice is None or isinstance(choice, CodecSpec):
        return choice, False
    if isinstance(choice, Mapping):
        if name in choice:
            return choice[name], True
        return next((codec for pattern, codec in choice.items() if fnmatchcase(name, pattern)), None), False
    codec = choice(name, shape, dtype)
    _check(codec, f"the codec that the function {getattr(choice, '__name__', choice)!r} returned for {name!r}")
    return codec, True


def _check(codec: Any, what: str) -> None:
    if codec is None:
        return
    if not isinstance(codec, CodecSpec):
        raise ConfigError(f"{what} is {codec!r}: expected a codec such as bpsfast.compression.onebit(), or None")
    check_types(codec)
    check(codec)
