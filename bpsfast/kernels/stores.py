"""Compiles, on first use, the kernels by which a node process updates the weights that it stores, at each push.

The C signature of every kernel (`pyx/store.h`)::

    void k(void *values, void *weights, void *momentum, int64 n_elements, int64 what, double learning_rate, double mu)

``values`` are of the wire dtype, ``weights`` and ``momentum`` of its accumulator: float32 for the halves. *what*::

    READ      values = weights
    SET       weights = values
    ADD       weights += values
    SHARE     weights += values / learning_rate, a number of workers
    NESTEROV  momentum = mu * momentum + values;  weights -= learning_rate * (values + mu * momentum)

NESTEROV is what ``torch.optim.SGD(nesterov=True)`` does, every operation rounded by itself; the two factors are rounded
to the accumulator first. The code takes no lock, allocates nothing, needs no GIL.

Importing this module does not import numba: only a node that owns a store needs it.
"""
from __future__ import annotations

from typing import Any

from .. import kernels
from ..base.dtypes import lookup
from ..orchestration.errors import UnsupportedError


def address(dtype_name: str) -> int:
    """Return the address of the kernel of a wire dtype, compiling it first if need be; any thread.

    Raises `UnsupportedError` for integers, in which no model is trained.
    """
    if not lookup(dtype_name).is_float:
        raise UnsupportedError(f"there is no store of {dtype_name}: weights are floats")
    def compile_kernel(cache: bool) -> Any:
        from . import store_ir

        return store_ir.compile_kernel(dtype_name, cache)

    return kernels.self_contained_address(("store", dtype_name), "store_ir.py", compile_kernel)
