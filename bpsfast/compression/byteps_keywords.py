"""BytePS's keywords for compression: those of `byteps_declare_tensor`, and `compression_params`.

The former are strings, which may begin with "byteps_", as attributes of parameters do. The latter are those of its
DistributedTrainer for MXNet. Keys that the chosen compressor does not use, and empty values, are ignored, because
programs pass all of them.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..orchestration.codec import CodecSpec
from ..orchestration.errors import ConfigError
from . import formats

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
    given = _renamed(keywords)
    kind = _word(given, "compressor", _COMPRESSORS)
    halves = "fp16" in given and _value(given, "fp16", _FLAGS)
    if kind is None:
        return formats.float16() if halves else None
    if halves:
        raise ConfigError(f"fp16 besides compressor={kind!r}: what {kind} sends is made of the gradient itself; leave "
                          "fp16 out (it only halved the bytes that this needs less of)")
    feedback = _word(given, "ef", ("vanilla",)) is not None
    mu = 0.0
    if _word(given, "momentum", ("nesterov",)) is not None:
        if "mu" not in given:
            raise ConfigError("momentum='nesterov' needs momentum_mu, the factor: what the optimizer's own momentum "
                              "would be, which must be 0 then")
        mu = _number(given, "mu")
    seed = _seed(given["seed"]) if "seed" in given else 1
    if kind == "onebit":
        scaled = "scaling" in given and _value(given, "scaling", _FLAGS)
        return formats.onebit(scaled, error_feedback=feedback, momentum=mu)
    if "k" not in given:
        raise ConfigError(f"compressor={kind!r} needs k: "
                          + ("the number of levels" if kind == "dithering" else "elements, or below 1 a fraction"))
    k = _number(given, "k")
    if kind == "topk":
        return formats.topk(k, error_feedback=feedback, momentum=mu)
    if kind == "randomk":
        return formats.randomk(k, seed=seed, error_feedback=feedback, momentum=mu)
    if k != int(k):
        raise ConfigError(f"compressor='dithering' with k={k:g}: k is the number of levels")
    return formats.dithering(int(k), partition=_value(given, "partition", _PARTITIONS, "linear"),
                             normalize=_value(given, "normalize", _NORMS, "max"), seed=seed, error_feedback=feedback,
                             momentum=mu)


def _renamed(keywords: Mapping[str, Any]) -> dict[str, Any]:
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


def _word(given: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str | None:
    return _value(given, key, {word: word for word in known}, None)


def _value(given: Mapping[str, Any], key: str, known: Mapping[str, Any], otherwise: Any = None) -> Any:
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
