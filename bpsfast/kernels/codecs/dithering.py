"""The codec "dithering": levels rounded at random, no zeros, in Elias delta codes. Format: `codec_reference`.

Streams of bits have the highest bit of a word first. Words of 64 bits are handled as two *units* of 32 bits, of which
the upper one is first in the stream and second in memory: *swap* is then 1, for words of 32 bits 0, and unit u is at
u ^ swap.
"""
from __future__ import annotations

import math

import numpy as np

from bpsfast.kernels.codecs.intrinsics import (
    counters_at,
    finite,
    floats_at,
    following,
    helper,
    is_below,
    is_null,
    leading_zeros,
    nbytes_of,
    quiet,
    units_at,
    values_at,
    words_at,
)
from bpsfast.kernels.codecs.reductions import largest, sum_of_squares
from bpsfast.orchestration.codec import L2, NATURAL

_UNIT = 32


@helper
def elias(value):  # type: ignore[no-untyped-def]
    """Return the Elias delta code of *value*, from 1 to below 2^40, as a number, and its number of bits.

    The code is as many zeros as the length has bits less one, the length, and the value without its highest bit.
    """
    length = np.uint64(64 - leading_zeros(value))
    tail = length - np.uint64(1)
    code = (length << tail) | (value ^ (np.uint64(1) << tail))
    return code, 2 * (63 - leading_zeros(length)) + np.int64(length)


@helper
def put(units, n_units, swap, position, begun, code, n_bits):  # type: ignore[no-untyped-def]
    """Write the *n_bits* (at most 64) of *code* at bit *position*, nothing beyond *n_units*.

    *begun* ends with the bits already in the unit there. Returns the new *begun*.
    """
    if n_bits > _UNIT:
        begun = _put(units, n_units, swap, position, begun, code >> np.uint64(_UNIT), n_bits - _UNIT)
        position += n_bits - _UNIT
        code &= np.uint64(0xFFFFFFFF)
        n_bits = _UNIT
    return _put(units, n_units, swap, position, begun, code, n_bits)


@helper
def finish(units, n_units, swap, position, begun):  # type: ignore[no-untyped-def]
    """Fill the last word with zeros."""
    n_begun = position & (_UNIT - 1)
    at = position >> 5
    if n_begun:
        if at < n_units:
            units[at ^ swap] = begun << np.uint64(_UNIT - n_begun)
        at += 1
    if at & swap and at < n_units:
        units[at ^ swap] = 0


@helper
def window(units, n_units, swap, position):  # type: ignore[no-untyped-def]
    """Return the 64 bits from bit *position* on, zeros beyond the *n_units*."""
    at = position >> 5
    skipped = np.uint64(position & (_UNIT - 1))
    if at + 2 < n_units:
        first, second, third = units[at ^ swap], units[(at + 1) ^ swap], np.uint64(units[(at + 2) ^ swap])
    else:
        first, second, third = _unit(units, n_units, swap, at), _unit(units, n_units, swap, at + 1), np.uint64(0)
    bits = (np.uint64(first) << np.uint64(_UNIT)) | np.uint64(second)
    return (bits << skipped) | (third >> (np.uint64(_UNIT) - skipped))


@helper
def take_elias(bits):  # type: ignore[no-untyped-def]
    """Return the value of the Elias delta code at the beginning of the 64 *bits*, and the code's number of bits.

    Returns (0, 64) if there is no code or it has more than 56 bits (values from 2^45).
    """
    n_zeros = leading_zeros(bits)
    if n_zeros > 5:
        return np.uint64(0), 64
    length = np.int64(bits >> np.uint64(63 - 2 * n_zeros))
    n_bits = 2 * n_zeros + length
    if n_bits > 56:
        return np.uint64(0), 64
    tail = np.uint64(length - 1)
    mask = (np.uint64(1) << tail) - np.uint64(1)
    return (np.uint64(1) << tail) | ((bits >> np.uint64(64 - n_bits)) & mask), n_bits


@helper
def _put(units, n_units, swap, position, begun, code, n_bits):  # type: ignore[no-untyped-def]
    """Write the unit, which may end with zeros for now; a branch to avoid that would be mispredicted."""
    begun = (begun << np.uint64(n_bits)) | code
    n_begun = (position & (_UNIT - 1)) + n_bits
    if position >> 5 < n_units:
        units[(position >> 5) ^ swap] = begun << np.uint64(2 * _UNIT - n_begun) >> np.uint64(_UNIT)
    return begun


@helper
def _unit(units, n_units, swap, at):  # type: ignore[no-untyped-def]
    return np.uint64(units[at ^ swap]) if at < n_units else np.uint64(0)


#: Elements of a chunk; scratch has two 64-bit words for each.
CHUNK = 256


def encode(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; *scratch* has two 64-bit words for each element of a chunk."""
    width = nbytes_of(x)
    levels = _levels(k, flags)
    norm = _norm(x, n, flags)
    n_words = max(0, room_nbytes - width - 4) // width
    if norm > 0:
        position = _write_levels(wire, n_words * width // 4, x, n, error, generator, flags, levels, norm, scratch)
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
    """See `codec_kernels`; uses no *scratch*."""
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
def _write_levels(wire, n_units, x, n, error, generator, flags, levels, norm, scratch):  # type: ignore[no-untyped-def]
    """Write the stream and the error of each element; return the number of bits.

    Each chunk has three loops: the random draws, which depend on each other; the levels, which LLVM vectorizes; and the
    codes of levels that are not 0.
    """
    units, swap = units_at(wire, 0), nbytes_of(x) // 8
    drawn, chosen = counters_at(scratch, 0), counters_at(scratch, 8 * CHUNK)
    a, b = generator[0], generator[1]
    begun = np.uint64(0)
    position = 0
    last = -1
    for start in range(0, n, CHUNK):
        here = values_at(x, start * nbytes_of(x), x)
        n_here = min(CHUNK, n - start)
        for i in range(n_here):
            a, b = following(a, b)
            drawn[i] = a + b
        _choose_levels(chosen, drawn, here, n_here, flags, levels, norm)
        for i in range(n_here):
            q = chosen[i]
            if q > 0:
                code, n_bits = elias(np.uint64(start + i - last))
                code = (code << np.uint64(1)) | np.uint64(here[i] < 0)
                level, n_level_bits = elias(q)
                if n_bits + n_level_bits < 32:  # mostly
                    code = (code << np.uint64(n_level_bits)) | level
                else:
                    begun = put(units, n_units, swap, position, begun, code, n_bits + 1)
                    position += n_bits + 1
                    code, n_bits = level, -1
                begun = put(units, n_units, swap, position, begun, code, n_bits + 1 + n_level_bits)
                position += n_bits + 1 + n_level_bits
                last = start + i
        if not is_null(error):
            for i in range(n_here):
                decoded = type(here[i])(_decoded(here[i] < 0, chosen[i], norm, levels))
                error[start + i] = finite(here[i] - decoded)
    finish(units, n_units, swap, position, begun)
    generator[0], generator[1] = a, b
    return position


@helper
def _choose_levels(chosen, drawn, x, n, flags, levels, norm):  # type: ignore[no-untyped-def]
    """Choose one of the two levels around each element."""
    if flags & NATURAL:
        for i in range(n):
            y = np.float64(abs(x[i])) / np.float64(norm) * np.float64(levels)
            floor, step = _power_below(y)
            chance = (y - np.float64(floor)) / np.float64(step)
            chosen[i] = min(levels, floor + step * np.int64(is_below(drawn[i], chance)))
    else:
        for i in range(n):
            y = np.float64(abs(x[i])) / np.float64(norm) * np.float64(levels)
            floor = np.int64(y)
            chosen[i] = min(levels, floor + np.int64(is_below(drawn[i], y - np.float64(floor))))


@helper
def _read_levels(out, n, wire, n_units, n_bits, levels, norm, add):  # type: ignore[no-untyped-def]
    """Read a stream of *n_bits*; return decode's result."""
    units, swap = units_at(wire, 0), nbytes_of(out) // 8
    position = 0
    last = -1
    while position < n_bits:
        bits = window(units, n_units, swap, position)
        gap, n_gap_bits = take_elias(bits)
        bits = bits << np.uint64(n_gap_bits) if n_gap_bits < 8 else window(units, n_units, swap, position + n_gap_bits)
        q, n_level_bits = take_elias(bits << np.uint64(1))
        position += n_gap_bits + 1 + n_level_bits
        if position > n_bits or gap == 0 or gap > np.uint64(n - 1 - last) or q == 0 or q > np.uint64(levels):
            return -1
        last += np.int64(gap)
        value = type(out[last])(_decoded(bits >> np.uint64(63), q, norm, levels))
        out[last] = quiet(out[last] + value) if add else value
    return 0


@helper
def _levels(k, flags):  # type: ignore[no-untyped-def]
    return 1 << (k - 1) if flags & NATURAL else k


@helper
def _power_below(y):  # type: ignore[no-untyped-def]
    """Return the power of two, or 0, at or below *y*, and the distance to the next one."""
    above = np.uint64(math.ceil(y))
    if above < 2:
        return 0, 1
    floor = 1 << (63 - leading_zeros(above - np.uint64(1)))
    return floor, floor


@helper
def _decoded(sign, q, norm, levels):  # type: ignore[no-untyped-def]
    """Return the value of level *q* as a double, negative if *sign* is 1."""
    return np.float64(np.int64(q) * (1 - 2 * np.int64(sign))) * np.float64(norm) / np.float64(levels)


@helper
def _norm(x, n, flags):  # type: ignore[no-untyped-def]
    """Return the norm as a float32, NaN if it is not finite."""
    norm = math.sqrt(sum_of_squares(x, n)) if flags & L2 else np.float64(largest(x, n))
    rounded = np.float32(norm)
    return rounded if rounded < np.float32(math.inf) else np.float32(math.nan)
