"""dithering: levels drawn at random, the zeros left out. The format is in `reading`."""
from __future__ import annotations

import math

import numpy as np

from bpsfast.compression.bits import elias, finish, put, take_elias, window
from bpsfast.compression.flags import L2, NATURAL
from bpsfast.compression.helper import helper
from bpsfast.compression.lanes import sum_of_squares
from bpsfast.compression.pointers import floats_at, is_null, leading_zeros, nbytes_of, units_at, words_at
from bpsfast.compression.random_draws import following, is_below
from bpsfast.compression.state import finite, quiet


def encode(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; needs no *scratch*."""
    width = nbytes_of(x)
    levels = _levels(k, flags)
    norm = _norm(x, n, flags)
    n_words = max(0, room_nbytes - width - 4) // width
    if norm > 0:
        position = _write_levels(wire, n_words * width // 4, x, n, error, generator, flags, levels, norm)
    else:
        position = 0
        if not is_null(error):
            for i in range(n):
                error[i] = finite(x[i] - norm)
    n_used = (position + 8 * width - 1) // (8 * width)
    if n_used > n_words or room_nbytes < width + 4 or position >> (8 * width - 1):
        return -1
    words_at(wire, 0, x)[n_used] = position
    floats_at(wire, (n_used + 1) * width)[0] = norm
    return (n_used + 1) * width + 4


def decode(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; needs no *scratch*."""
    width = nbytes_of(out)
    n_words = (nbytes - 4) // width - 1
    if n_words < 0 or nbytes != (n_words + 1) * width + 4:
        return -1
    n_bits = np.uint64(words_at(wire, 0, out)[n_words])
    norm = floats_at(wire, nbytes - 4)[0]
    if n_bits > np.uint64(8 * width * n_words) or n_bits + np.uint64(8 * width) <= np.uint64(8 * width * n_words):
        return -1
    if not norm < math.inf:
        for i in range(n):
            out[i] = math.nan
        return -1 if n_bits > 0 else 0
    if norm < 0:
        return -1
    if not add:
        for i in range(n):
            out[i] = 0
    return _read_levels(out, n, wire, n_words * width // 4, np.int64(n_bits), _levels(k, flags), norm, add)


@helper
def _write_levels(wire, n_units, x, n, error, generator, flags, levels, norm):  # type: ignore[no-untyped-def]
    """Write the stream, and what it leaves of each element; return its bits."""
    units, swap = units_at(wire, 0), nbytes_of(x) // 8
    keeps = not is_null(error)
    a, b = generator[0], generator[1]
    begun = np.uint64(0)
    position = 0
    last = -1
    for i in range(n):
        value = x[i]
        y = np.float64(abs(value)) / np.float64(norm) * np.float64(levels)
        floor, step = _floor(y, flags)
        a, b = following(a, b)
        draws = is_below(a + b, (y - np.float64(floor)) / np.float64(step))
        q = min(levels, floor + step * np.int64(draws))
        if q > 0:
            code, n_bits = elias(np.uint64(i - last))
            code = (code << np.uint64(1)) | np.uint64(value < 0)
            begun = put(units, n_units, swap, position, begun, code, n_bits + 1)
            position += n_bits + 1
            code, n_bits = elias(np.uint64(q))
            begun = put(units, n_units, swap, position, begun, code, n_bits)
            position += n_bits
            last = i
        if keeps:
            decoded = type(value)(_decoded(value < 0, np.float64(q), norm, levels))
            error[i] = finite(value - decoded)
    finish(units, n_units, swap, position, begun)
    generator[0], generator[1] = a, b
    return position


@helper
def _read_levels(out, n, wire, n_units, n_bits, levels, norm, add):  # type: ignore[no-untyped-def]
    """Read a stream of *n_bits*; return what decode returns."""
    units, swap = units_at(wire, 0), nbytes_of(out) // 8
    position = 0
    last = -1
    while position < n_bits:
        gap, n_gap_bits = take_elias(window(units, n_units, swap, position))
        bits = window(units, n_units, swap, position + n_gap_bits)
        q, n_level_bits = take_elias(bits << np.uint64(1))
        position += n_gap_bits + 1 + n_level_bits
        if position > n_bits or gap == 0 or gap > np.uint64(n - 1 - last) or q == 0 or q > np.uint64(levels):
            return -1
        last += np.int64(gap)
        value = type(out[last])(_decoded(bits >> np.uint64(63) != 0, np.float64(q), norm, levels))
        out[last] = quiet(out[last] + value) if add else value
    return 0


@helper
def _levels(k, flags):  # type: ignore[no-untyped-def]
    return 1 << (k - 1) if flags & NATURAL else k


@helper
def _floor(y, flags):  # type: ignore[no-untyped-def]
    """Return the level at or below *y*, and how far above it the next one is."""
    if not flags & NATURAL:
        return np.int64(y), 1
    above = np.uint64(math.ceil(y))
    if above < 2:
        return 0, 1
    floor = 1 << (63 - leading_zeros(above - np.uint64(1)))
    return floor, floor


@helper
def _decoded(is_negative, q, norm, levels):  # type: ignore[no-untyped-def]
    size = q * np.float64(norm) / np.float64(levels)
    return -size if is_negative else size


@helper
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
