"""The draws of randomk and dithering: xorshift128+, a state of two words. `reading.Generator` is the description."""
from __future__ import annotations

import numpy as np

from bpsfast.kernels.codecs.helper import helper


@helper
def following(a, b):  # type: ignore[no-untyped-def]
    """Return the state after (*a*, *b*); the 64 bits drawn are the sum of its words."""
    a ^= a << np.uint64(23)
    a ^= a >> np.uint64(17)
    return b, a ^ b ^ (b >> np.uint64(26))


@helper
def is_below(drawn, chance):  # type: ignore[no-untyped-def]
    """Say whether 64 bits that were drawn come to true with this *chance*."""
    return np.float64(drawn) < chance * 2.0**64
