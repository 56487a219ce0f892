"""The switches of a codec in the one number that kernels take."""
from __future__ import annotations

from bpsfast.orchestration.codec import CodecSpec

#: onebit sends the mean magnitude.
SCALED = 1
#: The levels of dithering are powers of two.
NATURAL = 2
#: The levels of dithering are relative to the Euclidean norm.
L2 = 4


def flags_of(codec: CodecSpec) -> int:
    """Return the *flags* of *codec*'s kernels."""
    return SCALED * codec.scaled | NATURAL * codec.natural | L2 * codec.l2
