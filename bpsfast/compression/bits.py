"""Streams of bits in words, the highest first, and Elias delta codes in them."""
from __future__ import annotations

import numpy as np
from numba import njit

from bpsfast.compression.pointers import leading_zeros, nbytes_of


@njit(inline="always")
def elias(value):  # type: ignore[no-untyped-def]
    """Return the Elias delta code of *value*, 1 at least and below 2^40, as a number, and its bits.

    The length of the length as zeros, the length, the value without its highest bit: the zeros come by themselves.
    """
    length = np.uint64(64 - leading_zeros(value))
    tail = length - np.uint64(1)
    code = (length << tail) | (value ^ (np.uint64(1) << tail))
    return code, 2 * (63 - leading_zeros(length)) + np.int64(length)


@njit(inline="always")
def put(words, n_words, position, begun, code, n_bits):  # type: ignore[no-untyped-def]
    """Write the low *n_bits* (below 64) of *code* at bit *position*; *begun*: the bits of its word that are there.

    Returns what is begun after it; of bits beyond *n_words* nothing is written.
    """
    width = 8 * nbytes_of(words)
    while n_bits > 0:
        room = width - position % width
        n_now = min(room, n_bits)
        n_bits -= n_now
        now = (code >> np.uint64(n_bits)) & ((np.uint64(1) << np.uint64(n_now)) - np.uint64(1))
        begun |= now << np.uint64(room - n_now)
        if room == n_now:
            if position // width < n_words:
                words[position // width] = begun
            begun = np.uint64(0)
        position += n_now
    return begun


@njit(inline="always")
def window(words, n_words, position):  # type: ignore[no-untyped-def]
    """Return the 64 bits from bit *position* on, zeros beyond the *n_words*."""
    width = 8 * nbytes_of(words)
    at = position // width
    skipped = np.uint64(position % width)
    bits = _word(words, n_words, at)
    if width == 64:
        if skipped == 0:
            return bits
        return (bits << skipped) | (_word(words, n_words, at + 1) >> (np.uint64(64) - skipped))
    bits = (bits << np.uint64(32)) | _word(words, n_words, at + 1)
    return (bits << skipped) | (_word(words, n_words, at + 2) >> (np.uint64(32) - skipped))


@njit(inline="always")
def take_elias(bits):  # type: ignore[no-untyped-def]
    """Return the value whose Elias delta code the 64 *bits* begin with, and the code's bits; (0, 64) of no such code.

    Codes of more than 56 bits, of values from 2^45 on, count as none.
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


@njit(inline="always")
def _word(words, n_words, at):  # type: ignore[no-untyped-def]
    return np.uint64(words[at]) if at < n_words else np.uint64(0)
