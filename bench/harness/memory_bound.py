"""Measures the memory bound of a push_pull on one machine: every rank reads its array and writes the sum, once each.

As many processes as there are ranks do that at once, each in arrays of its own, without waiting for each other; what
they add comes from a window that stays in the caches, as the bytes of other ranks can. No all-reduce of arrays that are
larger than the caches does less. The sum is stored into the caches or past them; which is faster depends on the size
and on where the cores are, so both are measured and the faster one counts.

It is an estimate: ranks that do not wait drift apart, and the last one has memory to itself for a while.
"""
from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

import bpsfast
from bpsfast.bench.harness.contestant import Operation
from bpsfast.orchestration.placement.partition import CACHED_NBYTES

_PREFIX, _PAST = "memory of ", ", past caches"
Array = np.ndarray[Any, Any]
#: How often each byte of an array goes through memory, in one rank: it is read, and written. Stores past the caches do
#: not read what they overwrite.
N_STREAMS = 2


def rows(variant: str) -> tuple[str, str]:
    """Return the names of the rows that measure the memory bound of *variant*."""
    return _PREFIX + variant, _PREFIX + variant + _PAST


def is_row(name: str) -> bool:
    """Tell whether a row called *name* is one of `rows`."""
    return name.startswith(_PREFIX)


class RankMemory:
    """Memory of one rank that all rows use, as large as the largest of them needs. Elements are float32.

    `private`: allocated as torch's tensors, without huge pages of its own; `inputs`: of `bpsfast.empty`.
    """

    def __init__(self) -> None:
        self.private, self.inputs = np.empty(0, np.float32), np.empty(0, np.float32)

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return the operation of the row called *variant* on arrays of *nbytes*: in place, or ("numpy") from `inputs`
        into `private`. Raises `OSError` if there is not as much memory.
        """
        if self.private.nbytes < nbytes:
            self.private = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32)
            self.private[:] = 0
        is_in_place = variant.removesuffix(_PAST) != _PREFIX + "numpy"
        if not is_in_place and self.inputs.nbytes < nbytes:
            self.inputs = bpsfast.empty((nbytes // 4,))
            self.inputs[:] = 0
        source = self.private if is_in_place else self.inputs
        sums = Sums(self.private[:nbytes // 4], source[:nbytes // 4], variant.endswith(_PAST))
        return Operation(sums.run, lambda known: None, lambda: 0)


class Sums:
    """Write *source* plus a window of as many bytes as stay in the caches to *target*; *past*: past the caches."""

    def __init__(self, target: Array, source: Array, past: bool) -> None:
        n = CACHED_NBYTES // 4
        self.window = np.zeros(n, np.float32)
        self._kept = target, source
        self._sum = _kernel()
        self._calls = [(target[at:].ctypes.data, _pointers([source[at:].ctypes.data, self.window.ctypes.data]), 0, 2, 0,
                        min(n, target.size - at), 1, past) for at in range(0, target.size, n)]

    def run(self) -> None:
        """Sum all of it."""
        for call in self._calls:
            self._sum(*call)


def _kernel() -> Callable[..., None]:
    from bpsfast import kernels  # imports numba, which only this measurement needs

    return kernels.SIGNATURE(kernels.address("float32"))


def _pointers(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)
