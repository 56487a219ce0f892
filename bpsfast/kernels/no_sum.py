"""A kernel that touches nothing: with the setting ``sums=off`` nodes move bytes, and what they would sum stays garbage.

For benches only: what is left of a push_pull's time is what the network and the engine cost.
"""
from __future__ import annotations

from typing import Any

_compiled: list[Any] = []  # owns the machine code for the life of the process


def address() -> int:
    """Return the address of the kernel, which has the signature of `kernels` and does nothing; any thread."""
    if not _compiled:
        from numba import cfunc, types

        signature = types.void(types.voidptr, types.voidptr, *[types.int64] * 6)
        _compiled.append(cfunc(signature)(_nothing))
    return int(_compiled[0].address)


def _nothing(dst, inputs, n_before, n_local, n_after, n_elements, divisor, nontemporal):  # type: ignore[no-untyped-def]
    return
