"""dithering: levels drawn at random, the zeros left out. The format is in `reading`."""
from __future__ import annotations

import math

import numpy as np
from numba import njit

from bpsfast.compression.bits import elias, put, take_elias, window
from bpsfast.compression.flags import L2, NATURAL
from bpsfast.compression.lanes import sum_of_squares
from bpsfast.compression.pointers import floats_at, is_null, leading_zeros, nbytes_of, words_at
from bpsfast.compression.random_draws import bernoulli
from bpsfast.compression.state import finite, quiet


def encode(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; needs no *scratch*."""
    width = nbytes_of(x)
    levels = _levels(k, flags)
    norm = _norm(x, n, flags)
    words = words_at(wire, 0, x)
    n_words = max(0, room_nbytes - width - 4) // width
    begun = np.uint64(0)
    position = 0
    last = -1
    if norm > 0:
        for i in range(n):
            value = x[i]
            q = _level(np.float64(abs(value)) / np.float64(norm) * np.float64(levels), flags, levels, generator)
            if q > 0:
                code, n_bits = elias(np.uint64(i - last))
                begun = put(words, n_words, position, begun, (code << np.uint64(1)) | np.uint64(value < 0), n_bits + 1)
                position += n_bits + 1
                code, n_bits = elias(np.uint64(q))
                begun = put(words, n_words, position, begun, code, n_bits)
                position += n_bits
                last = i
            if not is_null(error):
                decoded = _decoded(value < 0, np.float64(q), norm, levels)
                error[i] = finite(value - type(value)(decoded))
    elif not is_null(error):
        for i in range(n):
            error[i] = finite(x[i] - norm)
    n_used = (position + 8 * width - 1) // (8 * width)
    if n_used > n_words or room_nbytes < width + 4 or position >> (8 * width - 1):
        return -1
    if position % (8 * width):
        words[n_used - 1] = begun
    words[n_used] = position
    floats_at(wire, (n_used + 1) * width)[0] = norm
    return (n_used + 1) * width + 4


def decode(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; needs no *scratch*."""
    width = nbytes_of(out)
    n_words = (nbytes - 4) // width - 1
    if n_words < 0 or nbytes != (n_words + 1) * width + 4:
        return -1
    words = words_at(wire, 0, out)
    n_bits = np.uint64(words[n_words])
    norm = floats_at(wire, nbytes - 4)[0]
    if (n_bits + np.uint64(8 * width - 1)) // np.uint64(8 * width) != np.uint64(n_words) or norm < 0:
        return -1
    if not norm < math.inf:
        if n_bits > 0:
            return -1
        for i in range(n):
            out[i] = math.nan
        return 0
    if not add:
        for i in range(n):
            out[i] = 0
    levels = _levels(k, flags)
    end = np.int64(n_bits)
    position = 0
    last = -1
    while position < end:
        gap, n_gap_bits = take_elias(window(words, n_words, position))
        bits = window(words, n_words, position + n_gap_bits)
        q, n_level_bits = take_elias(bits << np.uint64(1))
        position += n_gap_bits + 1 + n_level_bits
        if position > end or gap == 0 or gap > np.uint64(n - 1 - last) or q == 0 or q > np.uint64(levels):
            return -1
        last += np.int64(gap)
        value = _decoded(bits >> np.uint64(63) != 0, np.float64(q), norm, levels)
        value = type(out[last])(value)
        out[last] = quiet(out[last] + value) if add else value
    return 0


@njit(inline="always")
def _levels(k, flags):  # type: ignore[no-untyped-def]
    return 1 << (k - 1) if flags & NATURAL else k


@njit(inline="always")
def _level(y, flags, levels, generator):  # type: ignore[no-untyped-def]
    """Draw one of the two levels about *y*."""
    if flags & NATURAL:
        above = np.uint64(math.ceil(y))
        floor = np.int64(0)
        if above > 1:
            floor = np.int64(1) << (63 - leading_zeros(above - np.uint64(1)))
        step = max(floor, 1)
    else:
        floor = np.int64(y)
        step = 1
    return min(levels, floor + step * np.int64(bernoulli(generator, (y - np.float64(floor)) / np.float64(step))))


@njit(inline="always")
def _decoded(is_negative, q, norm, levels):  # type: ignore[no-untyped-def]
    size = q * np.float64(norm) / np.float64(levels)
    return -size if is_negative else size


@njit
def _norm(x, n, flags):  # type: ignore[no-untyped-def]
    """Return the norm as a float32, NaN for one that is not finite."""
    if flags & L2:
        norm = math.sqrt(sum_of_squares(x, n))
    else:
        norm = 0.0
        for i in range(n):
            size = np.float64(abs(x[i]))
            norm = size if size > norm or size != size else norm
    rounded = np.float32(norm)
    return rounded if rounded < np.float32(math.inf) else np.float32(math.nan)
