"""Functions that make codecs, also from BytePS's keywords; each returns a `CodecSpec` or raises `ConfigError`.

*error_feedback* adds the part of a gradient that was not sent to the next one, on workers and owners. *momentum* is
Nesterov's, applied before compression, for an optimizer without momentum of its own. Nodes keep the state of both for
each partition. 16-bit floats are widened to float32 first.

BytePS's keywords (`from_byteps`) are those of `byteps_declare_tensor`, strings which may begin with "byteps_" as
attributes of parameters do, and those of `compression_params` of its DistributedTrainer for MXNet. Keys that the chosen
compressor does not use, and empty values, are ignored, because programs pass all of them.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

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


#: BytePS's key -> its name here
_KEYS = {
    "compressor_type": "compressor", "compressor": "compressor", "compressor_k": "k", "k": "k",
    "compressor_onebit_scaling": "scaling", "scaling": "scaling", "seed": "seed", "ef_type": "ef", "ef": "ef",
    "momentum_type": "momentum", "momentum": "momentum", "momentum_mu": "mu", "dithering_partition": "partition",
    "partition": "partition", "dithering_normalize": "normalize", "normalize": "normalize", "fp16": "fp16",
}
_COMPRESSORS = ("onebit", "topk", "randomk", "dithering")
#: BytePS writes numbers where its trainer takes names.
_PARTITIONS = {"0": "linear", "1": "natural", "linear": "linear", "natural": "natural"}
_NORMS = {"0": "max", "1": "l2", "max": "max", "l2": "l2"}
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def from_byteps(keywords: Mapping[str, Any]) -> CodecSpec | None:
    """Return the codec that BytePS's *keywords* ask for, None if they ask for none.

    As in BytePS, "onebit" is scaled only with "scaling", "k" of "dithering" is the number of levels, and momentum needs
    its factor "momentum_mu". DistributedTrainer takes that from the optimizer's momentum, which must be 0 here.

    Raises
    ------
    ConfigError
        A key or value is unknown or missing, or two contradict each other; the text lists the known ones.
    """
    if not isinstance(keywords, Mapping):
        raise ConfigError(f"from_byteps({keywords!r}): expected a mapping of BytePS's keywords, such as "
                          "{'compressor': 'topk', 'k': 0.01}")
    given = _our_keys(keywords)
    kind = _one_word(given, "compressor", _COMPRESSORS)
    halves = "fp16" in given and _mapped_value(given, "fp16", _FLAGS)
    if kind is None:
        return float16() if halves else None
    if halves:
        raise ConfigError(f"fp16 besides compressor={kind!r}: what {kind} sends is made of the gradient itself; leave "
                          "fp16 out (it only halved the bytes that this needs less of)")
    feedback = _one_word(given, "ef", ("vanilla",)) is not None
    mu = 0.0
    if _one_word(given, "momentum", ("nesterov",)) is not None:
        if "mu" not in given:
            raise ConfigError("momentum='nesterov' needs momentum_mu, the factor: what the optimizer's own momentum "
                              "would be, which must be 0 then")
        mu = _number(given, "mu")
    seed = _seed(given["seed"]) if "seed" in given else 1
    if kind == "onebit":
        scaled = "scaling" in given and _mapped_value(given, "scaling", _FLAGS)
        return onebit(scaled, error_feedback=feedback, momentum=mu)
    if "k" not in given:
        raise ConfigError(f"compressor={kind!r} needs k: "
                          + ("the number of levels" if kind == "dithering" else "elements, or below 1 a fraction"))
    k = _number(given, "k")
    if kind == "topk":
        return topk(k, error_feedback=feedback, momentum=mu)
    if kind == "randomk":
        return randomk(k, seed=seed, error_feedback=feedback, momentum=mu)
    if k != int(k):
        raise ConfigError(f"compressor='dithering' with k={k:g}: k is the number of levels")
    return dithering(int(k), partition=_mapped_value(given, "partition", _PARTITIONS, "linear"),
                     normalize=_mapped_value(given, "normalize", _NORMS, "max"), seed=seed, error_feedback=feedback,
                     momentum=mu)


def _our_keys(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return *keywords* by our names, without empty values."""
    given: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in keywords.items():
        ours = _KEYS.get(str(key).removeprefix("byteps_"))
        if ours is None:
            raise ConfigError(f"{key!r} is no keyword of BytePS's compression; there are {', '.join(_KEYS)}, each also "
                              "with byteps_ in front")
        if value is None or value == "":
            continue
        if ours in given and given[ours] != value:
            raise ConfigError(f"{spelled[ours]}={given[ours]!r} and {key}={value!r} say two things about one")
        given[ours], spelled[ours] = value, str(key)
    return given


def _one_word(given: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str | None:
    return _mapped_value(given, key, {word: word for word in known}, None)


def _mapped_value(given: Mapping[str, Any], key: str, known: Mapping[str, Any], otherwise: Any = None) -> Any:
    if key not in given:
        return otherwise
    text = str(given[key]).lower()
    if text not in known:
        raise ConfigError(f"{key}={given[key]!r} is unknown to BytePS's compression; there is {', '.join(known)}")
    return known[text]


def _number(given: Mapping[str, Any], key: str) -> float:
    try:
        value = float(given[key])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{key}={given[key]!r} of BytePS's compression is no number")
    return value


def _seed(given: Any) -> int:
    try:
        return int(given)
    except (TypeError, ValueError):
        raise ConfigError(f"seed={given!r} of BytePS's compression is no whole number") from None
