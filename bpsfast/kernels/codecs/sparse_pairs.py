"""The codecs "topk" and "randomk": some elements with their indices. Format: `codec_reference`."""
from __future__ import annotations

import math

import numpy as np

from bpsfast.kernels.codecs.intrinsics import (
    counters_at,
    finite,
    following,
    helper,
    is_null,
    nbytes_of,
    quiet,
    trailing_zeros,
    values_at,
    words_at,
)
from bpsfast.kernels.codecs.reductions import N_TOGETHER, largest, magnitude, reaching

#: Bits of a magnitude that one pass over the elements distinguishes, and the number of counters for them.
DIGIT_BITS = 11
N_DIGITS = 1 << DIGIT_BITS
#: Elements of the sample that estimates the k-th largest magnitude.
_N_SAMPLES = 4096


def scratch_nbytes(k: int, n: int, width: int) -> int:
    """Return the bytes of scratch for `encode_largest`: counters, and the candidates' magnitudes and indices."""
    return 8 * N_DIGITS + 2 * width * (max(_N_SAMPLES, _capacity.py_func(k, n)) if _uses_sampling.py_func(k, n) else 0)


def encode_largest(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; *scratch* has `scratch_nbytes`.

    A sample gives a bound that somewhat more than k elements probably reach; if they do, only those are compared.
    """
    n_sent = min(k, n)
    width = nbytes_of(x)
    if 2 * width * n_sent > room_nbytes:
        return -1
    counters = counters_at(scratch, 0)
    sizes, places = words_at(scratch, 8 * N_DIGITS, x), words_at(scratch, 8 * N_DIGITS + width, x)
    bits = words_at(x, 0, x)
    indices = words_at(wire, 0, x)
    values = values_at(wire, width, x)
    n_candidates = 0
    if _uses_sampling(n_sent, n):
        bound = _sampled_bound(sizes, bits, n, n_sent, counters)
        n_candidates = _collect(sizes, places, _capacity(n_sent, n), x, bits, n, bound)
    if n_candidates >= n_sent:
        above, n_equal = _threshold(sizes, 2, n_candidates, n_sent, counters)
    else:
        n_candidates = 0
        above, n_equal = _threshold(bits, 1, n, n_sent, counters)
    position = 0
    for candidate in range(n_candidates if n_candidates else n):
        if n_candidates:
            i = np.int64(places[2 * candidate])
        else:
            i = candidate
        size = magnitude(bits, i)
        if size >= above and position < n_sent:
            if size == above:
                if n_equal == 0:
                    continue
                n_equal -= 1
            indices[2 * position] = i
            values[2 * position] = quiet(x[i])
            position += 1
    if position < n_sent:  # another thread changes x meanwhile, so any elements will do
        for position in range(n_sent):
            indices[2 * position] = position
            values[2 * position] = quiet(x[position])
    _write_residual(error, x, n, indices, n_sent)
    return 2 * width * n_sent


def encode_drawn(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; uses no *scratch*."""
    n_sent = k if n > 0 else 0
    width = nbytes_of(x)
    if 2 * width * n_sent > room_nbytes:
        return -1
    indices = words_at(wire, 0, x)
    values = values_at(wire, width, x)
    a, b = generator[0], generator[1]
    for position in range(n_sent):
        a, b = following(a, b)
        index = (a + b) % np.uint64(n)
        indices[2 * position] = index
        values[2 * position] = quiet(x[index])
    generator[0], generator[1] = a, b
    if not largest(x, n) < math.inf:
        _send_non_finite(indices, values, x, n, n_sent)
    _write_residual(error, x, n, indices, n_sent)
    return 2 * width * n_sent


def decode_largest(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """See `codec_kernels`; uses no *scratch*."""
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
    """See `codec_kernels`; *scratch* has one bit for each element, in 64-bit words."""
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
    for position in range(n_sent - 1, -1, -1):  # of equal indices the last counts, as above
        index = np.uint64(indices[2 * position])
        mark = np.uint64(1) << (index & np.uint64(63))
        if not marks[index >> np.uint64(6)] & mark:
            marks[index >> np.uint64(6)] |= mark
            out[index] = quiet(out[index] + values[2 * position])
    return 0


@helper
def _send_non_finite(indices, values, x, n, n_sent):  # type: ignore[no-untyped-def]
    """Replace pairs, from the first one on, by the elements that are NaN or infinite."""
    position = 0
    for i in range(n):
        if position < n_sent and not abs(x[i]) < math.inf:
            indices[2 * position] = i
            values[2 * position] = quiet(x[i])
            position += 1


@helper
def _uses_sampling(n_sent, n):  # type: ignore[no-untyped-def]
    return n >= 4 * _N_SAMPLES and 8 * n_sent <= n


@helper
def _capacity(n_sent, n):  # type: ignore[no-untyped-def]
    """Return the largest number of candidates; about half as many are expected."""
    return 2 * n_sent + n // 256


@helper
def _sampled_bound(sizes, bits, n, n_sent, counters):  # type: ignore[no-untyped-def]
    """Return a magnitude that more than *n_sent* elements reach, if the sample (*sizes*) is representative."""
    for sample in range(_N_SAMPLES):
        sizes[2 * sample] = magnitude(bits, sample * n // _N_SAMPLES)
    mean = np.float64(_N_SAMPLES) * np.float64(n_sent) / np.float64(n)
    return _threshold(sizes, 2, _N_SAMPLES, np.int64(mean + 3.0 * math.sqrt(mean)) + 3, counters)[0]


@helper
def _collect(sizes, places, capacity, x, bits, n, bound):  # type: ignore[no-untyped-def]
    """Write magnitude and index of all elements of at least *bound*; return their number, 0 if it is too large."""
    n_found = 0
    for start in range(0, n, N_TOGETHER):
        if start + N_TOGETHER <= n:
            found = reaching(x, start, bound)
        else:
            found = np.uint64(0)
            for i in range(start, n):
                found |= np.uint64(magnitude(bits, i) >= bound) << np.uint64(i - start)
        while found:
            if n_found == capacity:
                return 0
            i = start + trailing_zeros(found)
            found &= found - np.uint64(1)
            sizes[2 * n_found] = magnitude(bits, i)
            places[2 * n_found] = i
            n_found += 1
    return n_found


@helper
def _threshold(bits, stride, n, n_sent, counters):  # type: ignore[no-untyped-def]
    """Return the magnitude of the last of the *n_sent* largest elements, and the number of such elements among them.

    It is found digit by digit, the highest first: each pass counts the elements that have the digits found so far. If
    another thread changes the elements meanwhile, the result is any magnitude.
    """
    left = 8 * nbytes_of(bits) - 1
    prefix = np.uint64(0)
    wanted = np.uint64(n_sent)
    while left > 0 and n_sent > 0:
        shift = max(0, left - DIGIT_BITS)
        mask = np.uint64((1 << (left - shift)) - 1)
        for digit in range(N_DIGITS):
            counters[digit] = 0
        for i in range(n):
            size = magnitude(bits, i * stride)
            if size >> np.uint64(left) == prefix:
                counters[(size >> np.uint64(shift)) & mask] += np.uint64(1)
        digit = np.int64(mask)
        while digit > 0 and counters[digit] < wanted:
            wanted -= counters[digit]
            digit -= 1
        prefix = (prefix << np.uint64(left - shift)) | np.uint64(digit)
        left = shift
    return prefix, np.int64(wanted)


@helper
def _write_residual(error, x, n, indices, n_sent):  # type: ignore[no-untyped-def]
    if is_null(error):
        return
    for i in range(n):
        error[i] = finite(x[i])
    for position in range(n_sent):
        error[indices[2 * position]] = 0
