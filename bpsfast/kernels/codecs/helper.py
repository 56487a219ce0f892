"""How what kernels call is compiled."""
from __future__ import annotations

from numba import njit

#: Decorates a function that kernels call: it has no way in from Python, which halves the time to compile it, and a
#: division by zero raises nothing.
helper = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]
