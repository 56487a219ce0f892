"""The kernels of stores: what a push does to the weights that an owner keeps, compiled on first use.

The C signature of every kernel (`pyx/store.h`)::

    void k(void *values, void *weights, void *momentum, int64 n_elements, int64 what, double learning_rate, double mu)

``values`` are of the wire dtype, ``weights`` and ``momentum`` of its accumulator: float32 for the halves. *what*::

    READ      values = weights
    SET       weights = values
    ADD       weights += values
    NESTEROV  momentum = mu * momentum + values;  weights -= learning_rate * (values + mu * momentum)

NESTEROV is the arithmetic of ``torch.optim.SGD(nesterov=True)``, every operation rounded by itself. The code takes no
lock, allocates nothing, needs no GIL.

Importing this module imports no numba: only a node that owns a store pays for it.
"""
from __future__ import annotations

import threading
from typing import Any

from .dtypes import lookup
from .orchestration.errors import UnsupportedError

READ, SET, ADD, NESTEROV = range(4)

_lock = threading.Lock()
#: wire dtype -> numba cfunc: owns the machine code for the life of the process
_compiled: dict[str, Any] = {}


def address(dtype_name: str) -> int:
    """Return the address of the kernel of a wire dtype, compiling it first if need be (half a second); any thread.

    Raises `UnsupportedError` for integers: nothing learns in them.
    """
    row = lookup(dtype_name)
    if not row.is_float:
        raise UnsupportedError(f"there is no store of {dtype_name}: weights are floats")
    with _lock:
        if dtype_name not in _compiled:
            _compiled[dtype_name] = _compile(dtype_name)
        return int(_compiled[dtype_name].address)


def _compile(name: str) -> Any:
    import numpy as np
    from numba import carray, cfunc, types

    row = lookup(name)
    wide = np.dtype(row.accumulator)
    wire = np.dtype(np.int16) if row.itemsize == 2 else wide  # numba has no halves
    number = wide.type
    widen, narrow = _conversions(name)

    def step(values, weights, momentum, n_elements, what, learning_rate, mu):  # type: ignore[no-untyped-def]
        x, w = carray(values, n_elements, wire), carray(weights, n_elements, wide)
        m = carray(momentum, n_elements, wide)
        rate, decay = number(learning_rate), number(mu)
        if what == READ:
            for i in range(n_elements):
                x[i] = narrow(w[i])
        elif what == SET:
            for i in range(n_elements):
                w[i] = widen(x[i])
        elif what == ADD:
            for i in range(n_elements):
                w[i] += widen(x[i])
        else:
            for i in range(n_elements):
                d = widen(x[i])
                m[i] = decay * m[i] + d
                w[i] -= rate * (d + decay * m[i])

    signature = types.void(*[types.voidptr] * 3, types.int64, types.int64, types.float64, types.float64)
    return cfunc(signature)(step)


def _conversions(name: str) -> tuple[Any, Any]:
    """Return two intrinsics: what widens an element of the wire dtype *name* to its accumulator, and back."""
    from numba import types
    from numba.extending import intrinsic

    from .element import Element
    from .vector_sum import target

    wide = types.float64 if name == "float64" else types.float32
    wire = types.int16 if name in ("float16", "bfloat16") else wide

    def element(builder: Any) -> Element:
        triple, _, features = target()
        return Element(builder, name, triple, features)

    @intrinsic
    def widen(typing, x):  # type: ignore[no-untyped-def]
        return wide(wire), lambda context, builder, signature, args: element(builder).widen(args[0], 1)

    @intrinsic
    def narrow(typing, x):  # type: ignore[no-untyped-def]
        return wire(wide), lambda context, builder, signature, args: element(builder).finish(args[0], 1)

    return widen, narrow
