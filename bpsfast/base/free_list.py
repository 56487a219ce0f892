"""First-fit free list: allocates ranges of bytes in shared memory, and joins neighbouring free ranges. No I/O."""
from __future__ import annotations

from bisect import bisect_left


class FreeList:
    """The free runs of *nbytes* that begin at 0. Not thread-safe."""

    def __init__(self, nbytes: int = 0) -> None:
        self._begins: list[int] = [0] if nbytes else []
        self._ends: list[int] = [nbytes] if nbytes else []

    @property
    def nbytes(self) -> int:
        """Free bytes, in pieces of any size."""
        return sum(self._ends) - sum(self._begins)

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest free run."""
        return max((end - begin for begin, end in zip(self._begins, self._ends)), default=0)

    def take(self, nbytes: int) -> int | None:
        """Allocate *nbytes* and return their offset; None if no run is long enough."""
        for i, (begin, end) in enumerate(zip(self._begins, self._ends)):
            if end - begin >= nbytes:
                self._begins[i] += nbytes
                if self._begins[i] == end:
                    del self._begins[i], self._ends[i]
                return begin
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Free the *nbytes* at *offset*. Raises `ValueError` if some of them are free already."""
        end = offset + nbytes
        i = bisect_left(self._begins, offset)
        if (i and self._ends[i - 1] > offset) or (i < len(self._begins) and self._begins[i] < end):
            raise ValueError(f"bytes {offset} to {end} are freed, but some of them are free already")
        self._begins.insert(i, offset)
        self._ends.insert(i, end)
        if i + 1 < len(self._begins) and self._begins[i + 1] == end:
            del self._begins[i + 1], self._ends[i]
        if i and self._ends[i - 1] == offset:
            del self._begins[i], self._ends[i - 1]
