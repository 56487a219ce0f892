"""The kernel of ``sums=off`` has the kernels' signature and touches nothing."""
from __future__ import annotations

import ctypes

import numpy as np

from bpsfast import kernels


def test_it_touches_nothing():
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 6)(kernels.no_sum_address())
    result, first = np.full(64, 7, np.float32), np.ones(64, np.float32)
    inputs = (ctypes.c_void_p * 1)(first.ctypes.data)
    kernel(result.ctypes.data, ctypes.addressof(inputs), 0, 1, 0, 64, 1, 1)
    assert (result == 7).all() and (first == 1).all()
    assert kernels.no_sum_address() == kernels.no_sum_address() != 0
