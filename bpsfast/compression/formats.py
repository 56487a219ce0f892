"""The codecs, one function each, which returns the choice or raises `ConfigError`.

*error_feedback* adds the part of a gradient that was not sent to the next one, on workers and owners. *momentum* is
Nesterov's, applied before compression, for an optimizer without momentum of its own. Nodes keep the state of both for
each partition. 16-bit floats are widened to float32 first.
"""
from __future__ import annotations

import math
from typing import Literal

import msgspec

from ..orchestration.codec import CodecSpec, check
from ..orchestration.errors import ConfigError


def onebit(scaled: bool = True, *, error_feedback: bool = False, momentum: float = 0.0) -> CodecSpec:
    """Send signs, 1/32 of float32's bytes. *scaled*: times the mean magnitude of the partition, else times 1."""
    return _checked(CodecSpec(kind="onebit", scaled=scaled, error_feedback=error_feedback, momentum=momentum))


def topk(k: float, *, error_feedback: bool = False, momentum: float = 0.0) -> CodecSpec:
    """Send the *k* largest elements of each partition with their indices; *k* below 1: that fraction of them.

    Each sent element takes twice its bytes, so at most half of a partition's elements are sent.
    """
    return _checked(CodecSpec(kind="topk", k=k, error_feedback=error_feedback, momentum=momentum))


def randomk(k: float, *, seed: int = 1, error_feedback: bool = False, momentum: float = 0.0) -> CodecSpec:
    """Send *k* random elements of each partition, other ones each time, the same on all nodes; *k* as in `topk`."""
    return _checked(CodecSpec(kind="randomk", k=k, seed=seed, error_feedback=error_feedback, momentum=momentum))


def dithering(levels: int, *, partition: Literal["linear", "natural"] = "linear",
              normalize: Literal["max", "l2"] = "max", seed: int = 1, error_feedback: bool = False,
              momentum: float = 0.0) -> CodecSpec:
    """Send each element as one of *levels* levels, rounded at random without bias, in Elias codes.

    *partition*: levels are equidistant ("linear") or powers of two ("natural"). *normalize*: they are relative to the
    partition's largest magnitude ("max") or to its Euclidean norm ("l2").
    """
    natural = _one_of("partition", partition, ("linear", "natural")) == "natural"
    l2 = _one_of("normalize", normalize, ("max", "l2")) == "l2"
    return _checked(CodecSpec(kind="dithering", k=levels, natural=natural, l2=l2, seed=seed,
                              error_feedback=error_feedback, momentum=momentum))


def float16(*, error_feedback: bool = False, momentum: float = 0.0) -> CodecSpec:
    """Send float16. Magnitudes above 65504 become infinite."""
    return _checked(CodecSpec(kind="float16", error_feedback=error_feedback, momentum=momentum))


def bfloat16(*, error_feedback: bool = False, momentum: float = 0.0) -> CodecSpec:
    """Send bfloat16, which has the range of float32 and 8 bits of precision."""
    return _checked(CodecSpec(kind="bfloat16", error_feedback=error_feedback, momentum=momentum))


def int8(*, error_feedback: bool = False, momentum: float = 0.0) -> CodecSpec:
    """Send 8-bit integers, with a scale for each 256 of them by which the largest magnitude is 127."""
    return _checked(CodecSpec(kind="int8", error_feedback=error_feedback, momentum=momentum))


def where_it_pays(codec: CodecSpec) -> CodecSpec:
    """Return *codec* for those tensors only for which it shortens steps; the others stay exact.

    The job decides when tensors are declared, by its NICs' rates, which must all be known, and logs the decision at
    INFO (`orchestration.placement.codec_choice`). Raises `ConfigError` if *codec* has momentum, which exact tensors
    would lack without their optimizer's knowledge.
    """
    if not isinstance(codec, CodecSpec):
        raise ConfigError(f"where_it_pays({codec!r}): expected a codec such as bpsfast.compression.topk(0.01)")
    if codec.momentum:
        raise ConfigError(f"where_it_pays of compression {codec.kind!r} with momentum={codec.momentum:g}: tensors that "
                          "stay exact would have none; leave the momentum to the optimizer")
    return _checked(msgspec.structs.replace(codec, auto=True))


def _one_of(what: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"dithering with {what}={value!r}: expected {' or '.join(map(repr, known))}")
    return value


def _checked(codec: CodecSpec) -> CodecSpec:
    check_types(codec)
    check(codec)
    return codec


def check_types(codec: CodecSpec) -> None:
    """Raise `ConfigError` if a field of *codec* has the wrong type or is not finite; msgspec does not check that."""
    for name, kinds in _TYPES.items():
        value = getattr(codec, name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"compression {codec.kind!r} with {name}={value!r}: expected "
                              f"{' or '.join(kind.__name__ for kind in kinds)}, got {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"compression {codec.kind!r} with {name}={value}: expected a finite number")


_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str,), "k": (float, int), "scaled": (bool,), "natural": (bool,), "l2": (bool,), "seed": (int,),
    "error_feedback": (bool,), "momentum": (float, int), "auto": (bool,)}
