"""Streams of bits, the highest of a word first, and Elias delta codes in them.

Words of 64 bits are handled as two *units* of 32, the upper one first in the stream and second in memory: *swap* is 1
then, of words of 32 bits 0, and unit u lies at u ^ swap.
"""
from __future__ import annotations

import numpy as np

from bpsfast.kernels.codecs.helper import helper
from bpsfast.kernels.codecs.intrinsics import leading_zeros

_UNIT = 32


@helper
def elias(value):  # type: ignore[no-untyped-def]
    """Return the Elias delta code of *value*, 1 at least and below 2^40, as a number, and its bits.

    The length of the length as zeros, the length, the value without its highest bit: the zeros come by themselves.
    """
    length = np.uint64(64 - leading_zeros(value))
    tail = length - np.uint64(1)
    code = (length << tail) | (value ^ (np.uint64(1) << tail))
    return code, 2 * (63 - leading_zeros(length)) + np.int64(length)


@helper
def put(units, n_units, swap, position, begun, code, n_bits):  # type: ignore[no-untyped-def]
    """Write the *n_bits* (64 at most) of *code*, which has no others, at bit *position*.

    *begun* ends with the bits of the unit there. Returns what is begun after it; beyond *n_units* nothing is written.
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


@helper
def _put(units, n_units, swap, position, begun, code, n_bits):  # type: ignore[no-untyped-def]
    """Write a whole unit, or for now one with zeros at its end: which of them, a branch could not foretell."""
    begun = (begun << np.uint64(n_bits)) | code
    n_begun = (position & (_UNIT - 1)) + n_bits
    if position >> 5 < n_units:
        units[(position >> 5) ^ swap] = begun << np.uint64(2 * _UNIT - n_begun) >> np.uint64(_UNIT)
    return begun


@helper
def _unit(units, n_units, swap, at):  # type: ignore[no-untyped-def]
    return np.uint64(units[at ^ swap]) if at < n_units else np.uint64(0)
