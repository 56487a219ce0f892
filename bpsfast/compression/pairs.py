"""topk and randomk: some elements with their indices. The format is in `reading`."""
from __future__ import annotations

import numpy as np
from numba import njit

from bpsfast.compression.pointers import counters_at, is_null, nbytes_of, values_at, words_at
from bpsfast.compression.random_draws import draw
from bpsfast.compression.state import finite, quiet

#: Bits of a magnitude that one pass over the elements tells apart, and the counters this takes.
DIGIT_BITS = 11
N_DIGITS = 1 << DIGIT_BITS


def encode_largest(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; *scratch* takes `N_DIGITS` words of 64 bits."""
    n_sent = min(k, n)
    width = nbytes_of(x)
    if 2 * width * n_sent > room_nbytes:
        return -1
    bits = words_at(x, 0, x)
    above, n_equal = _threshold(bits, n, n_sent, counters_at(scratch, 0))
    indices = words_at(wire, 0, x)
    values = values_at(wire, width, x)
    position = 0
    for i in range(n):
        size = _magnitude(bits, i)
        if size >= above and position < n_sent:
            if size == above:
                if n_equal == 0:
                    continue
                n_equal -= 1
            indices[2 * position] = i
            values[2 * position] = quiet(x[i])
            position += 1
    _keep_rest(error, x, n, indices, n_sent)
    return 2 * width * n_sent


def encode_drawn(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; needs no *scratch*."""
    n_sent = k if n > 0 else 0
    width = nbytes_of(x)
    if 2 * width * n_sent > room_nbytes:
        return -1
    indices = words_at(wire, 0, x)
    values = values_at(wire, width, x)
    for position in range(n_sent):
        index = draw(generator) % np.uint64(n)
        indices[2 * position] = index
        values[2 * position] = quiet(x[index])
    _keep_rest(error, x, n, indices, n_sent)
    return 2 * width * n_sent


def decode_largest(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; needs no *scratch*."""
    n_sent = min(k, n)
    width = nbytes_of(out)
    if nbytes != 2 * width * n_sent:
        return -1
    indices = words_at(wire, 0, out)
    values = values_at(wire, width, out)
    if not add:
        for i in range(n):
            out[i] = 0
    first = np.uint64(0)
    for position in range(n_sent):
        index = np.uint64(indices[2 * position])
        if index < first or index >= np.uint64(n):
            return -1
        first = index + np.uint64(1)
        value = values[2 * position]
        out[index] = quiet(out[index] + value) if add else quiet(value)
    return 0


def decode_drawn(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; *scratch* takes a bit an element, in words of 64."""
    n_sent = k if n > 0 else 0
    width = nbytes_of(out)
    if nbytes != 2 * width * n_sent:
        return -1
    indices = words_at(wire, 0, out)
    values = values_at(wire, width, out)
    for position in range(n_sent):
        if np.uint64(indices[2 * position]) >= np.uint64(n):
            return -1
    if not add:
        for i in range(n):
            out[i] = 0
        for position in range(n_sent):
            out[np.uint64(indices[2 * position])] = quiet(values[2 * position])
        return 0
    marks = counters_at(scratch, 0)
    for position in range(n_sent):
        marks[indices[2 * position] >> 6] = 0
    for position in range(n_sent - 1, -1, -1):  # the last of equals counts, as above
        index = np.uint64(indices[2 * position])
        mark = np.uint64(1) << (index & np.uint64(63))
        if not marks[index >> np.uint64(6)] & mark:
            marks[index >> np.uint64(6)] |= mark
            out[index] = quiet(out[index] + values[2 * position])
    return 0


@njit(inline="always")
def _magnitude(bits, i):  # type: ignore[no-untyped-def]
    """Return |x| of element *i* as a number that orders as magnitudes do, all NaN alike the largest."""
    if nbytes_of(bits) == 4:
        return min(np.uint64(bits[i]) & np.uint64(0x7FFFFFFF), np.uint64(0x7F800001))
    return min(np.uint64(bits[i]) & np.uint64(0x7FFFFFFFFFFFFFFF), np.uint64(0x7FF0000000000001))


@njit
def _threshold(bits, n, n_sent, counters):  # type: ignore[no-untyped-def]
    """Find the magnitude of the last of the *n_sent* largest; return it, and how many as large are among them.

    A digit of the magnitude after the other, the highest first: each pass counts the elements whose digits before are
    those of the threshold.
    """
    left = 8 * nbytes_of(bits)
    prefix = np.uint64(0)
    wanted = np.uint64(n_sent)
    while left > 0 and n_sent > 0:
        shift = max(0, left - DIGIT_BITS)
        mask = np.uint64((1 << (left - shift)) - 1)
        for digit in range(N_DIGITS):
            counters[digit] = 0
        if left == 8 * nbytes_of(bits):
            for i in range(n):
                counters[_magnitude(bits, i) >> np.uint64(shift)] += np.uint64(1)
        else:
            for i in range(n):
                size = _magnitude(bits, i)
                if size >> np.uint64(left) == prefix:
                    counters[(size >> np.uint64(shift)) & mask] += np.uint64(1)
        digit = np.int64(mask)
        while counters[digit] < wanted:
            wanted -= counters[digit]
            digit -= 1
        prefix = (prefix << np.uint64(left - shift)) | np.uint64(digit)
        left = shift
    return prefix, np.int64(wanted)


@njit
def _keep_rest(error, x, n, indices, n_sent):  # type: ignore[no-untyped-def]
    if is_null(error):
        return
    for i in range(n):
        error[i] = finite(x[i])
    for position in range(n_sent):
        error[indices[2 * position]] = 0
