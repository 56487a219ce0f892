"""Memory bound: what goes through memory for a push_pull on one machine, and nothing else. Nobody waits for anybody.

As many processes as there are ranks move the same bytes between as many places as a push_pull does, and sum them with
the same kernels, so that the bound falls where caches end, as the push_pull does. What one process reads another one
reads the next time. What is stored last (the sum, or what a rank gets) goes into the caches, or past them; which is
faster is a matter of size, and of where the cores are, so the faster one counts.

It is an estimate: ranks that do not wait drift apart, and the last one has memory to itself for a while.
"""
from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import bpsfast
from bpsfast.bench.harness.contestant import Operation
from bpsfast.orchestration.errors import CapacityError
from bpsfast.orchestration.placement.partition import CACHED_NBYTES
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import copy
from bpsfast.trainer.chunk_descriptors import is_worth, n_at_once

_PREFIX, _PAST = "memory of ", ", past caches"
Array = np.ndarray[Any, Any]
#: Arrays, and shares of them, begin where no two have a page in common.
_ALIGN = 1024
_PIECE = CACHED_NBYTES // 4


def rows(variant: str) -> tuple[str, str]:
    """Return how the rows are called that tell what memory allows *variant*."""
    return _PREFIX + variant, _PREFIX + variant + _PAST


def is_row(name: str) -> bool:
    """Tell whether a row called *name* is one of `rows`."""
    return name.startswith(_PREFIX)


def streams(variant: str, n_local: int, nbytes: int) -> int:
    """Return how often each byte of one rank's gradient goes through memory, in all *n_local* ranks together.

    Stores past the caches do not read what they overwrite, so a store is one stream.
    """
    if variant == "numpy":
        return n_local + 1  # every input read, the result written
    if variant == "in place":  # the least an all-reduce of private memory can do: every buffer read, and written
        return 2 * n_local
    if is_worth(-(-nbytes // CACHED_NBYTES), n_local):
        return 2 * n_local + 2  # through the caches but for what is private, and the sum: read, and written
    return 3 * n_local + 1 + 2 * n_local


class Places:
    """Memory of one rank that all rows use: as much as the largest of them wanted. Elements are float32."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.shared, self.private = np.empty(0, np.float32), np.empty(0, np.float32)
        self.n_moved, self._base, self._n_grown = 0, 0, 0

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return what the row called *variant* times, for gradients of *nbytes*. All ranks call it alike, at once.

        Raises
        ------
        CapacityError
            In all ranks, if there is not as much memory that all can map.
        OSError
            If this rank does not get as much of its own.
        """
        kind = Sums if variant.removesuffix(_PAST) == _PREFIX + "numpy" else Passage
        found = kind(self, nbytes, variant.endswith(_PAST))
        self._share(found.n_shared)
        if kind is Passage and self.private.nbytes < nbytes:  # as torch allocates: no huge pages unless all have them
            self.private = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32)
            self.private[:] = 0
            self.n_moved += 1
        return Operation(found.run, lambda known: None, lambda: 0)

    def address(self, element: int) -> int:
        """Return where an element of `shared` is, until `n_moved` grows."""
        return self._base + 4 * element

    def _share(self, n: int) -> None:
        """Let `shared` have *n* elements at least: rank 0's."""
        if self.shared.size >= n:
            return
        self._n_grown += 1
        segment, error, place = None, 0, np.zeros(2, np.int64)
        if self.rank == 0:
            try:
                segment = Segment(4 * n, name="bpsfast bench")
                place[:] = os.getpid(), segment.fileno()
            except OSError as exc:
                error = exc.errno or errno.ENOMEM
        pid, fd = self._sum(place, "place")
        if self.rank != 0 and pid:
            try:
                segment = _attach(pid, fd)
            except OSError as exc:
                error = exc.errno or errno.ENOMEM
        own = np.zeros(1 + self.size, np.int64)
        own[0], own[1 + self.rank] = segment is not None, error
        n_mapped, *errors = self._sum(own, "mapped")
        if segment is None or n_mapped < self.size:
            reasons = ", ".join(f"rank {rank}: {os.strerror(each)}" for rank, each in enumerate(errors) if each)
            raise CapacityError(f"{n_mapped} of {self.size} ranks have mapped the {4 * n} bytes of rank 0 that the "
                                f"bench shares; {reasons}")
        self.lay_out(np.frombuffer(segment, np.float32))

    def lay_out(self, shared: Array) -> None:
        """Use *shared*, which has all that the rows so far wanted."""
        self.shared, self._base = shared, shared.ctypes.data
        self.n_moved += 1

    def _sum(self, values: Array, what: str) -> list[int]:
        name = f"memory bound: {what}, {self._n_grown}"
        total: list[int] = bpsfast.push_pull(values, average=False, name=name).tolist()
        return total


class Sums:
    """Inputs of all ranks are read where they are, and their sum is written to one of two places by turns.

    *past*: past the caches.
    """

    def __init__(self, places: Places, nbytes: int, past: bool) -> None:
        self._places, self._n, self._past, self._turn, self._sum = places, nbytes // 4, past, 0, _kernel()
        self._stride = -(-self._n // _ALIGN) * _ALIGN
        self.n_shared = self._stride * (places.size + 2)
        self._calls: list[tuple[Any, ...]] = []
        self._n_moved = -1

    @property
    def inputs(self) -> list[Array]:
        """All ranks'."""
        return [self._array(rank) for rank in range(self._places.size)]

    @property
    def results(self) -> list[Array]:
        """The two."""
        return [self._array(self._places.size + parity) for parity in (0, 1)]

    def _array(self, index: int) -> Array:
        return self._places.shared[index * self._stride:index * self._stride + self._n]

    def share(self, turn: int) -> tuple[int, int]:
        """Return the first element that this rank sums in a turn, and the end: another share in the next."""
        n, size, which = self._n, self._places.size, (self._places.rank + turn) % self._places.size
        begin, end = (min(n, -(-n * i // (size * _ALIGN)) * _ALIGN) for i in (which, which + 1))
        return begin, end

    def run(self) -> None:
        """Sum this turn's share."""
        if self._n_moved != self._places.n_moved:
            self._n_moved = self._places.n_moved
            self._calls = [self._call(turn) for turn in range(2 * self._places.size)]
        self._sum(*self._calls[self._turn % len(self._calls)])
        self._turn += 1

    def _call(self, turn: int) -> tuple[Any, ...]:
        size, (begin, end) = self._places.size, self.share(turn)
        parity = turn // size % 2  # no rank keeps one of the two
        at = [self._places.address(index * self._stride + begin) for index in range(size + 2)]
        return at[size + parity], _pointers(at[:size]), 0, size, 0, end - begin, 1, self._past


class Passage:
    """Private memory goes through a window a piece at a time: copied in, the rank's share of it summed, copied out.

    Windows of all ranks, and the two places of the sum by turns, are shared. *past*: copied out past the caches.
    """

    def __init__(self, places: Places, nbytes: int, past: bool) -> None:
        self._places, self._n, self._turn, self._sum = places, nbytes // 4, 0, _kernel()
        self._stream_nbytes = 0 if past else nbytes + 1
        n_pieces = -(-self._n // _PIECE)
        self._window = (n_at_once(places.size) if is_worth(n_pieces, places.size) else n_pieces) * _PIECE
        self._stride = n_pieces * _PIECE
        self.n_shared = places.size * self._window + 2 * self._stride
        self._chunks: tuple[list[_Chunk], list[_Chunk]] = [], []
        self._n_moved = -1

    def result(self, parity: int) -> Array:
        """Return one of the two places of the sum."""
        begin = self._places.size * self._window + parity * self._stride
        return self._places.shared[begin:begin + self._n]

    def run(self) -> None:
        """Let all of the private memory through."""
        if self._n_moved != self._places.n_moved:
            self._n_moved, self._chunks = self._places.n_moved, (self._chunk_list(0), self._chunk_list(1))
        chunks = self._chunks[self._turn % 2]
        self._turn += 1
        for outside, inside, nbytes, target, sources, n, source in chunks:
            copy(inside, outside, nbytes, nbytes + 1)
            self._sum(target, sources, 0, self._places.size, 0, n, 1, 0)
            copy(outside, source, nbytes, self._stream_nbytes)

    def _chunk_list(self, parity: int) -> list[_Chunk]:
        rank, size, chunks = self._places.rank, self._places.size, []
        for begin in range(0, self._n, _PIECE):
            n, at = min(_PIECE, self._n - begin), begin % self._window
            first, end = (n * which // size for which in (rank, rank + 1))
            source = self._places.address(size * self._window + parity * self._stride + begin)
            windows = [self._places.address(i * self._window + at) for i in range(size)]
            chunks.append((self._places.private.ctypes.data + 4 * begin, windows[rank], 4 * n, source + 4 * first,
                         _pointers([window + 4 * first for window in windows]), end - first, source))
        return chunks


#: From where in private memory to which place of the window, bytes; what sums where and of what, elements; from where
#: the whole sum goes back.
_Chunk = tuple[int, int, int, int, Any, int, int]


def _kernel() -> Callable[..., None]:
    from bpsfast import kernels  # and numba: only where sums are measured

    return kernels.SIGNATURE(kernels.address("float32"))


def _pointers(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _attach(pid: int, fd: int) -> Segment:
    """Map what is descriptor *fd* of process *pid*."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        return Segment.attach(own, writable=True)
    except OSError:
        os.close(own)
        raise
