"""How a tensor is compressed between nodes: what a user chooses, whether it can be, and how many bytes it takes. Pure.

Formats and arithmetic are those of BytePS (`byteps/common/compressor`), for which see
`bpsfast/kernels/codecs/codec_reference.py`.
"""
from __future__ import annotations

from typing import Literal

import msgspec

from .errors import ConfigError, UnsupportedError

Kind = Literal["onebit", "topk", "randomk", "dithering", "float16", "bfloat16", "int8"]
KINDS = ("onebit", "topk", "randomk", "dithering", "float16", "bfloat16", "int8")

#: In front of what a codec writes: its length in bytes, 64 bits. A receiver has room for the longest, and looks here.
FRAME_NBYTES = 8
#: Elements that share one scale.
INT8_BLOCK = 256
#: Most levels of dithering: linear, and natural (where they are powers of two).
_MOST_LEVELS, _MOST_NATURAL_LEVELS = 1 << 20, 30
#: Bytes of an element while it is compressed: 16-bit floats are widened first.
_WIDTH = {"float32": 4, "float64": 8, "float16": 4, "bfloat16": 4}


class CodecSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A choice of compression for one tensor, the same on all ranks.

    `k`: of "topk" and "randomk" how many elements of a partition are sent, below 1 their fraction; of "dithering" the
    levels. `scaled`: "onebit" sends the mean magnitude, else every element counts 1. `natural`: the levels of
    "dithering" are powers of two; `l2`: they are relative to the Euclidean norm, else to the largest magnitude. `seed`
    of the draws of "randomk" and "dithering", for every partition and on every node alike. `error_feedback`: what was
    not sent is added to the next gradient, on workers and owners. `momentum`: Nesterov's, on workers; 0: none. `auto`:
    only if that is expected to pay on the job's machines (`codec_choice`), else not at all.
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
    """Raise `ConfigError` if *codec* is not possible."""
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
    """Return the bytes of an element of *dtype* while it is compressed; `UnsupportedError` if it cannot be."""
    if dtype not in _WIDTH:
        raise UnsupportedError(f"tensors of {dtype} are not compressed: only {', '.join(_WIDTH)}")
    return _WIDTH[dtype]


def count(codec: CodecSpec, n_elements: int) -> int:
    """Return how many of *n_elements*, one at least, "topk" or "randomk" sends; the levels of "dithering".

    At most half of the elements of a partition are sent: more would take more bytes than all.
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
    """Return the bytes if every element is written, at the highest level: no gap costs more than the codes it saves."""
    highest = 1 << (int(codec.k) - 1) if codec.natural else int(codec.k)
    bits = n_elements * (2 + elias_bits(highest))
    return -(-bits // (8 * width)) * width + width + 4


def elias_bits(value: int) -> int:
    """Return the bits of the Elias delta code of *value*, 1 at least."""
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
