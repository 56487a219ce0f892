"""onebit: the signs of a partition, and one scale. The format is in `reading`."""
from __future__ import annotations

import math

import numpy as np

from bpsfast.compression.flags import SCALED
from bpsfast.compression.lanes import sum_of_magnitudes
from bpsfast.compression.pointers import floats_at, is_null, nbytes_of, words_at
from bpsfast.compression.state import finite, quiet


def encode(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; needs neither *generator* nor *scratch*."""
    width = 8 * nbytes_of(x)
    n_words = (n + width - 1) // width
    if n_words * nbytes_of(x) + 4 > room_nbytes:
        return -1
    words = words_at(wire, 0, x)
    total = sum_of_magnitudes(x, n)
    for i in range(n_words):
        word = np.uint64(0)
        for j in range(width):
            word = word << np.uint64(1)
            at = i * width + j
            if at < n:
                word |= np.uint64(x[at] < 0)
        words[i] = word
    if flags & SCALED:
        scale = np.float32(total / max(1, n))
    else:
        scale = np.float32(1.0) if total == total else np.float32(math.nan)
    floats_at(wire, n_words * nbytes_of(x))[0] = quiet(scale)
    if not is_null(error):
        for i in range(n):
            error[i] = finite(x[i] + scale) if x[i] < 0 else finite(x[i] - scale)
    return n_words * nbytes_of(x) + 4


def decode(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; needs no *scratch*."""
    width = 8 * nbytes_of(out)
    n_words = (n + width - 1) // width
    if nbytes != n_words * nbytes_of(out) + 4:
        return -1
    scale = floats_at(wire, n_words * nbytes_of(out))[0]
    words = words_at(wire, 0, out)
    for i in range(n):
        is_negative = (np.uint64(words[i // width]) >> np.uint64(width - 1 - i % width)) & np.uint64(1)
        value = -scale if is_negative else scale
        out[i] = quiet(out[i] + value) if add else quiet(value)
    return 0
