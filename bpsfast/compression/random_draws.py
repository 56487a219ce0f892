"""The draws of randomk and dithering: xorshift128+, a state of two words. `reading.Generator` is the description."""
from __future__ import annotations

import numpy as np
from numba import njit


@njit(inline="always")
def draw(generator):  # type: ignore[no-untyped-def]
    """Return the next 64 bits of the two words that *generator* points to."""
    t, s = generator[0], generator[1]
    t ^= t << np.uint64(23)
    t ^= t >> np.uint64(17)
    t ^= s ^ (s >> np.uint64(26))
    generator[0] = s
    generator[1] = t
    return t + s


@njit(inline="always")
def bernoulli(generator, chance):  # type: ignore[no-untyped-def]
    """Draw true with this chance."""
    return np.float64(draw(generator)) < chance * 2.0**64
