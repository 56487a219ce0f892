"""Memory before an inaccessible page, so that an access past its end kills the process."""
from __future__ import annotations

import ctypes
import mmap

import numpy as np

_PROT_NONE = 0


class GuardedMemory:
    """*capacity_nbytes* of memory before such a page; each `take` ends at the page."""

    def __init__(self, capacity_nbytes: int) -> None:
        n_pages = -(-capacity_nbytes // mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, (n_pages + 1) * mmap.PAGESIZE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._end = n_pages * mmap.PAGESIZE
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if protect(self._bytes.ctypes.data + self._end, mmap.PAGESIZE, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect refused the guard page")

    def take(self, nbytes: int) -> np.ndarray:
        """Return the last *nbytes* before the page."""
        return self._bytes[self._end - nbytes : self._end]
