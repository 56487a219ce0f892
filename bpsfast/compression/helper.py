"""How what kernels call is compiled."""
from __future__ import annotations

from typing import Any

from numba import njit

# Without ways in from Python and C, which nobody uses, compiling takes two thirds of the time.
_OPTIONS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

#: Decorates a function that kernels call. A division by zero in it raises nothing.
helper = njit(error_model="numpy", **_OPTIONS)
