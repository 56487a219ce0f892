"""Measures the memory bound of a push_pull on one machine: the same copies and sums, without any waiting.

As many processes as there are ranks move the same bytes between as many areas as a push_pull does, and sum them with
the same kernels, so that the bound falls where caches end, as the push_pull does. Data that one process reads is read
by another one the next time. The last stores (of the sum, or of what a rank receives) go into the caches or past them;
which is faster depends on the size and on where the cores are, so both are measured and the faster one counts.

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
#: Arrays, and shares of them, begin at multiples of a page, so that no two have one in common.
_ALIGN = 1024
_PIECE = CACHED_NBYTES // 4


def rows(variant: str) -> tuple[str, str]:
    """Return the names of the rows that measure the memory bound of *variant*."""
    return _PREFIX + variant, _PREFIX + variant + _PAST


def is_row(name: str) -> bool:
    """Tell whether a row called *name* is one of `rows`."""
    return name.startswith(_PREFIX)


def streams(variant: str, n_local: int, nbytes: int) -> int:
    """Return how often each byte of one rank's gradient goes through memory, in all *n_local* ranks together.

    Stores past the caches do not read what they overwrite, so a store is one stream.
    """
    if variant == "numpy":
        return n_local + 1  # each input is read, the result is written
    if variant == "in place":  # the least an all-reduce of private memory can do: every buffer read, and written
        return 2 * n_local
    if is_worth(-(-nbytes // CACHED_NBYTES), n_local):
        return 2 * n_local + 2  # through the caches but for what is private, and the sum: read, and written
    return 3 * n_local + 1 + 2 * n_local


class RankMemory:
    """Memory of one rank that all rows use, as large as the largest of them needs. Elements are float32."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.shared, self.private = np.empty(0, np.float32), np.empty(0, np.float32)
        self.n_moved, self._base, self._n_grown = 0, 0, 0

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return the operation of the row called *variant* on gradients of *nbytes*. All ranks call this at once.

        Raises `CapacityError` in all ranks if they cannot all map as much memory, `OSError` if this rank does not get
        as much private memory.
        """
        kind = Sums if variant.removesuffix(_PAST) == _PREFIX + "numpy" else StagedSums
        found = kind(self, nbytes, variant.endswith(_PAST))
        self._share(found.n_shared)
        if kind is StagedSums and self.private.nbytes < nbytes:  # as torch allocates: no huge pages of its own
            self.private = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32)
            self.private[:] = 0
            self.n_moved += 1
        return Operation(found.run, lambda known: None, lambda: 0)

    def address(self, element: int) -> int:
        """Return the address of an element of `shared`, valid until `n_moved` grows."""
        return self._base + 4 * element

    def _share(self, n: int) -> None:
        """Make `shared` at least *n* elements of rank 0's memory."""
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
        self.lay_out(np.frombuffer(memoryview(segment), np.float32))

    def lay_out(self, shared: Array) -> None:
        """Use *shared*, which is large enough for the rows so far."""
        self.shared, self._base = shared, shared.ctypes.data
        self.n_moved += 1

    def _sum(self, values: Array, what: str) -> list[int]:
        name = f"memory bound: {what}, {self._n_grown}"
        total: list[int] = bpsfast.push_pull(values, average=False, name=name).tolist()
        return total


class Sums:
    """Read the inputs of all ranks in place, and write their sum to two areas in turns; *past*: past the caches."""

    def __init__(self, memory: RankMemory, nbytes: int, past: bool) -> None:
        self._memory, self._n, self._past, self._turn, self._sum = memory, nbytes // 4, past, 0, _kernel()
        self._stride = -(-self._n // _ALIGN) * _ALIGN
        self.n_shared = self._stride * (memory.size + 2)
        self._calls: list[tuple[Any, ...]] = []
        self._n_moved = -1

    @property
    def inputs(self) -> list[Array]:
        """The inputs of all ranks."""
        return [self._array(rank) for rank in range(self._memory.size)]

    @property
    def results(self) -> list[Array]:
        """The two areas of the sum."""
        return [self._array(self._memory.size + parity) for parity in (0, 1)]

    def _array(self, index: int) -> Array:
        return self._memory.shared[index * self._stride:index * self._stride + self._n]

    def share(self, turn: int) -> tuple[int, int]:
        """Return the begin and end of what this rank sums in a turn, in elements; each turn has another share."""
        n, size, which = self._n, self._memory.size, (self._memory.rank + turn) % self._memory.size
        begin, end = (min(n, -(-n * i // (size * _ALIGN)) * _ALIGN) for i in (which, which + 1))
        return begin, end

    def run(self) -> None:
        """Sum this turn's share."""
        if self._n_moved != self._memory.n_moved:
            self._n_moved = self._memory.n_moved
            self._calls = [self._call(turn) for turn in range(2 * self._memory.size)]
        self._sum(*self._calls[self._turn % len(self._calls)])
        self._turn += 1

    def _call(self, turn: int) -> tuple[Any, ...]:
        size, (begin, end) = self._memory.size, self.share(turn)
        parity = turn // size % 2  # each rank writes to both areas
        at = [self._memory.address(index * self._stride + begin) for index in range(size + 2)]
        return at[size + parity], _pointers(at[:size]), 0, size, 0, end - begin, 1, self._past


class StagedSums:
    """Copy private memory piece by piece into a window, sum the rank's share of it, and copy the sum out.

    The windows of all ranks and the two areas of the sum, used in turns, are shared. *past*: copy out past the caches.
    """

    def __init__(self, memory: RankMemory, nbytes: int, past: bool) -> None:
        self._memory, self._n, self._turn, self._sum = memory, nbytes // 4, 0, _kernel()
        self._stream_nbytes = 0 if past else nbytes + 1
        n_pieces = -(-self._n // _PIECE)
        self._window = (n_at_once(memory.size) if is_worth(n_pieces, memory.size) else n_pieces) * _PIECE
        self._stride = n_pieces * _PIECE
        self.n_shared = memory.size * self._window + 2 * self._stride
        self._chunks: tuple[list[_Chunk], list[_Chunk]] = [], []
        self._n_moved = -1

    def result(self, parity: int) -> Array:
        """Return one of the two areas of the sum."""
        begin = self._memory.size * self._window + parity * self._stride
        return self._memory.shared[begin:begin + self._n]

    def run(self) -> None:
        """Exchange all of the private memory."""
        if self._n_moved != self._memory.n_moved:
            self._n_moved, self._chunks = self._memory.n_moved, (self._chunk_list(0), self._chunk_list(1))
        chunks = self._chunks[self._turn % 2]
        self._turn += 1
        for outside, inside, nbytes, target, sources, n, source in chunks:
            copy(inside, outside, nbytes, nbytes + 1)
            self._sum(target, sources, 0, self._memory.size, 0, n, 1, 0)
            copy(outside, source, nbytes, self._stream_nbytes)

    def _chunk_list(self, parity: int) -> list[_Chunk]:
        rank, size, chunks = self._memory.rank, self._memory.size, []
        for begin in range(0, self._n, _PIECE):
            n, at = min(_PIECE, self._n - begin), begin % self._window
            first, end = (n * which // size for which in (rank, rank + 1))
            source = self._memory.address(size * self._window + parity * self._stride + begin)
            windows = [self._memory.address(i * self._window + at) for i in range(size)]
            chunks.append((self._memory.private.ctypes.data + 4 * begin, windows[rank], 4 * n, source + 4 * first,
                         _pointers([window + 4 * first for window in windows]), end - first, source))
        return chunks


#: Address in private memory, address in the window, bytes; target of the rank's share of the sum, its sources, its
#: elements; address of the whole sum.
_Chunk = tuple[int, int, int, int, Any, int, int]


def _kernel() -> Callable[..., None]:
    from bpsfast import kernels  # imports numba, which only this measurement needs

    return kernels.SIGNATURE(kernels.address("float32"))


def _pointers(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _attach(pid: int, fd: int) -> Segment:
    """Map the memory that descriptor *fd* of process *pid* stands for."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        return Segment.attach(own, writable=True)
    except OSError:
        os.close(own)
        raise
