"""How a tensor is compressed between nodes: the settings, checked, and the size in bytes. Pure.

Formats and arithmetic are those of BytePS (`byteps/common/compressor`); see
`bpsfast/kernels/codecs/codec_reference.py`.
"""
from __future__ import annotations

from typing import Literal

import msgspec

from .errors import ConfigError, UnsupportedError

Kind = Literal["onebit", "topk", "randomk", "dithering", "float16", "bfloat16", "int8"]
KINDS = ("onebit", "topk", "randomk", "dithering", "float16", "bfloat16", "int8")

#: Bytes of the length in front of a codec's output. A receiver has room for the longest frame, and reads this.
FRAME_NBYTES = 8
#: Elements of an int8 block, which share one scale.
INT8_BLOCK = 256
#: Most levels of dithering: linear, and natural (powers of two).
_MOST_LEVELS, _MOST_NATURAL_LEVELS = 1 << 20, 30
#: Bytes of an element while it is compressed, or kept by a store: 16-bit floats are widened first.
WIDTHS = {"float32": 4, "float64": 8, "float16": 4, "bfloat16": 4}


class CodecSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one tensor is compressed, the same on all ranks.

    `k`: of "topk" and "randomk" the number of elements of a partition that are sent, or a fraction if below 1; of
    "dithering" the number of levels. `scaled`: "onebit" sends the mean magnitude; else every element counts 1.
    `natural`: the levels of "dithering" are powers of two; `l2`: they are relative to the Euclidean norm, else to the
    largest magnitude. `seed`: of the random numbers of "randomk" and "dithering", the same for all partitions and
    nodes. `error_feedback`: what was not sent is added to the next gradient, on workers and owners. `momentum`:
    Nesterov's, on workers; 0: none. `auto`: compress only if that is expected to pay on the job's machines
    (`codec_choice`).
    """

    kind: Kind
    k: float = 0.0
    scaled: bool = True
    natural: bool = False
    l2: bool = False
    seed: int = 1
    error_feedback: bool = False
    momentum: float = 0.0
    auto: bool = False

    @property
    def has_state(self) -> bool:
        """Whether owners keep more than a sum from round to round."""
        return self.error_feedback


def check(codec: CodecSpec) -> None:
    """Raise `ConfigError` if *codec* is not valid."""
    if codec.kind not in KINDS:
        raise ConfigError(f"compression {codec.kind!r} is unknown; there are {', '.join(KINDS)}")
    if codec.kind in ("topk", "randomk") and not (0 < codec.k < 1 or (codec.k >= 1 and codec.k == int(codec.k))):
        raise ConfigError(f"{codec.kind} of k={codec.k:g}: k is a number of elements, or a fraction between 0 and 1")
    if codec.kind == "dithering":
        most = _MOST_NATURAL_LEVELS if codec.natural else _MOST_LEVELS
        if not 1 <= codec.k <= most or codec.k != int(codec.k):
            raise ConfigError(f"dithering with k={codec.k:g}: k is the number of levels, 1 to {most}")
    if not 0 < codec.seed < 1 << 64:
        raise ConfigError(f"compression with seed={codec.seed}: 1 to 2^64 - 1")
    if not 0 <= codec.momentum < 1:
        raise ConfigError(f"compression with momentum={codec.momentum:g}: it is at least 0 and below 1")


def width_of(dtype: str) -> int:
    """Return the bytes of an element of *dtype* while it is compressed; raise `UnsupportedError` if it cannot be."""
    if dtype not in WIDTHS:
        raise UnsupportedError(f"tensors of {dtype} are not compressed: only {', '.join(WIDTHS)}")
    return WIDTHS[dtype]


def count(codec: CodecSpec, n_elements: int) -> int:
    """Return how many of *n_elements* "topk" or "randomk" sends, at least 1; of "dithering" the number of levels.

    At most half of the elements of a partition are sent, because more would take more bytes than all of them.
    """
    if codec.kind in ("topk", "randomk"):
        wanted = int(codec.k * n_elements) if codec.k < 1 else int(codec.k)
        return max(1, min(wanted, n_elements // 2))
    return int(codec.k)


def frame_nbytes(codec: CodecSpec, n_elements: int, dtype: str) -> int:
    """Return the bytes of the longest frame of *n_elements* of *dtype*."""
    width = width_of(dtype)
    return FRAME_NBYTES + {
        "onebit": -(-n_elements // (8 * width)) * width + 4,
        "topk": 2 * width * count(codec, n_elements),
        "randomk": 2 * width * count(codec, n_elements),
        "dithering": _dithered_nbytes(codec, n_elements, width),
        "float16": 2 * n_elements,
        "bfloat16": 2 * n_elements,
        "int8": n_elements + 4 * -(-n_elements // INT8_BLOCK),
    }[codec.kind]


def _dithered_nbytes(codec: CodecSpec, n_elements: int, width: int) -> int:
    """Return the bytes if every element has the highest level: a gap never costs more than the codes that it saves."""
    highest = 1 << (int(codec.k) - 1) if codec.natural else int(codec.k)
    bits = n_elements * (2 + elias_bits(highest))
    return -(-bits // (8 * width)) * width + width + 4


def elias_bits(value: int) -> int:
    """Return the bits of the Elias delta code of *value*, which is at least 1."""
    length = value.bit_length()
    return 2 * (length.bit_length() - 1) + length


#: onebit sends the mean magnitude.
SCALED = 1
#: The levels of dithering are powers of two.
NATURAL = 2
#: The levels of dithering are relative to the Euclidean norm.
L2 = 4


def flags_of(codec: CodecSpec) -> int:
    """Return the *flags* of *codec*'s kernels."""
    return SCALED * codec.scaled | NATURAL * codec.natural | L2 * codec.l2
