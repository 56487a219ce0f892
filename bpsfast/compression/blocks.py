"""int8: blocks of elements, each with its scale. The format is in `reading`."""
from __future__ import annotations

import math

import numpy as np
from numba import njit

from bpsfast.compression.pointers import floats_at, is_null
from bpsfast.compression.state import finite, quiet
from bpsfast.orchestration.codec import INT8_BLOCK


def encode(wire, room_nbytes, x, n, error, generator, k, flags, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; needs neither *generator* nor *scratch*."""
    n_blocks = (n + INT8_BLOCK - 1) // INT8_BLOCK
    if 4 * n_blocks + n > room_nbytes:
        return -1
    scales = floats_at(wire, 0)
    for block in range(n_blocks):
        start = block * INT8_BLOCK
        end = min(n, start + INT8_BLOCK)
        scale = _scale(x, start, end)
        scales[block] = scale
        for i in range(start, end):
            wire[4 * n_blocks + i] = np.uint8(_number(x[i], scale) & 0xFF)
        if not is_null(error):
            for i in range(start, end):
                error[i] = finite(x[i] - type(x[i])(_number(x[i], scale)) * scale)
    return 4 * n_blocks + n


def decode(out, n, wire, nbytes, k, flags, add, scratch):  # type: ignore[no-untyped-def]
    """As `kernels` says; needs no *scratch*."""
    n_blocks = (n + INT8_BLOCK - 1) // INT8_BLOCK
    if nbytes != 4 * n_blocks + n:
        return -1
    scales = floats_at(wire, 0)
    for block in range(n_blocks):
        scale = scales[block]
        for i in range(block * INT8_BLOCK, min(n, (block + 1) * INT8_BLOCK)):
            value = type(out[i])(np.int8(wire[4 * n_blocks + i])) * scale
            out[i] = quiet(out[i] + value) if add else quiet(value)
    return 0


@njit
def _scale(x, start, end):  # type: ignore[no-untyped-def]
    """Return the float32 that is worth 1; NaN if an element is NaN or infinite, or too large for a float32."""
    most = abs(x[start])
    for i in range(start, end):
        size = abs(x[i])
        most = size if size > most or size != size else most
    scale = np.float32(most / type(most)(127))
    return scale if scale < np.float32(math.inf) else np.float32(math.nan)


@njit(inline="always")
def _number(value, scale):  # type: ignore[no-untyped-def]
    """Return *value* as a whole number of scales, -127 to 127; 0 if the scale is 0 or NaN."""
    if not scale > 0:
        return np.int32(0)
    return np.int32(min(max(np.rint(value / type(value)(scale)), -127.0), 127.0))
