"""Memory bound: what goes through memory for a push_pull on one machine, and nothing else. Nobody waits for anybody.

As many processes as there are ranks move the same bytes between as many places as a push_pull does, and sum them with
the same kernels, so that the bound falls where caches end, as the push_pull does. What one of them reads another has
read or written before, as in a training: there, half of what is summed was written by others.

A row of it is called as its operation with `PREFIX` before it.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import bpsfast
from bpsfast.bench.contestant import Operation
from bpsfast.orchestration.placement.partition import CACHED_NBYTES
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import FAR_NBYTES, copy
from bpsfast.trainer.sliding_window import n_slots

PREFIX = "memory of "
Array = np.ndarray[Any, Any]
#: Shares begin where no two of them have a page in common.
_ALIGN = 1024


def streams(variant: str, n_local: int, nbytes: int) -> int:
    """Return how often each byte of one rank's gradient goes through memory, in all *n_local* ranks together.

    Stores past the caches do not read what they overwrite, so a store is one stream.
    """
    if variant == "numpy":
        return n_local + 1  # every input read, the result written
    if variant == "in place":  # the least an all-reduce of private memory can do: every buffer read, and written
        return 2 * n_local
    if -(-nbytes // CACHED_NBYTES) >= 2 * n_slots(n_local):  # it slides: through the caches but for what is private,
        return 2 * n_local + 2  # and the sum: read, and written
    return 3 * n_local + 1 + 2 * n_local


def operation(variant: str, rank: int, size: int, nbytes: int) -> Operation:
    """Return *variant*'s streams for gradients of *nbytes* of float32. All *size* ranks call it at once."""
    if variant.removeprefix(PREFIX) == "numpy":
        memory = _shared(rank, size, Sums.total_nbytes(size, nbytes), nbytes)
        return Operation(Sums(rank, size, nbytes, memory).run, lambda known: None, lambda: 0)
    return Operation(Passage(size, nbytes).run, lambda known: None, lambda: 0)


class Sums:
    """Inputs of all ranks are read where they are, and their sum is written to one of two places by turns.

    All ranks give the same *memory* of `total_nbytes`.
    """

    def __init__(self, rank: int, size: int, nbytes: int, memory: Segment) -> None:
        self._rank, self._size, self._turn, self._sum = rank, size, 0, _kernel()
        stride = _stride(nbytes)
        whole = np.frombuffer(memory, np.float32)
        arrays = [whole[i * stride:(i + 1) * stride][:nbytes // 4] for i in range(size + 2)]
        self.inputs, self.results = arrays[:size], arrays[size:]
        self._is_far = nbytes >= FAR_NBYTES

    @staticmethod
    def total_nbytes(size: int, nbytes: int) -> int:
        """Return how much memory *size* ranks need for gradients of *nbytes*."""
        return 4 * _stride(nbytes) * (size + 2)

    def share(self, turn: int) -> slice:
        """Return the elements that this rank sums in a turn: another share in the next."""
        n, size, which = self.inputs[0].size, self._size, (self._rank + turn) % self._size
        begin, end = (min(n, -(-n * i // (size * _ALIGN)) * _ALIGN) for i in (which, which + 1))
        return slice(begin, end)

    def run(self) -> None:
        """Sum this turn's share."""
        self._turn += 1
        share = self.share(self._turn)
        if share.stop > share.start:
            self._sum(self.results[self._turn % 2][share], (), [each[share] for each in self.inputs], (),
                      nontemporal=self._is_far)


class Passage:
    """Private memory goes through a window a piece at a time: copied in, the rank's share of it summed, copied out."""

    def __init__(self, size: int, nbytes: int) -> None:
        self.private, self._sum = np.zeros(nbytes // 4, np.float32), _kernel()
        self._stream_nbytes = 0 if nbytes >= FAR_NBYTES else nbytes + 1
        self._slots = min(-(-nbytes // CACHED_NBYTES), n_slots(size))
        window = Segment((size + 1) * self._slots * CACHED_NBYTES, name="bpsfast bench")
        *self._inputs, self._result = np.frombuffer(window, np.float32).reshape(size + 1, -1)

    def run(self) -> None:
        """Let all of the private memory through."""
        result, inputs, piece = self._result, self._inputs, CACHED_NBYTES // 4
        for i, begin in enumerate(range(0, self.private.size, piece)):
            n = min(piece, self.private.size - begin)
            at = i % self._slots * piece
            outside = self.private.ctypes.data + 4 * begin
            copy(inputs[0].ctypes.data + 4 * at, outside, 4 * n)
            share = slice(at, at + -(-n // len(inputs)))
            self._sum(result[share], (), [each[share] for each in inputs], (), nontemporal=False)
            copy(outside, result.ctypes.data + 4 * at, 4 * n, self._stream_nbytes)


def _kernel() -> Callable[..., None]:
    from bpsfast import kernels  # and numba: only where sums are measured

    return kernels.fused_sum


def _stride(nbytes: int) -> int:
    """Return the elements from one array to the next."""
    return -(-nbytes // (4 * _ALIGN)) * _ALIGN


def _shared(rank: int, size: int, total_nbytes: int, nbytes: int) -> Segment:
    """Return memory that all ranks have mapped: rank 0's."""
    place = np.zeros(2, np.int64)
    if rank == 0:
        own = Segment(total_nbytes, name="bpsfast bench")
        place[:] = os.getpid(), own.fileno()
    pid, fd = bpsfast.push_pull(place, average=False, name=f"{PREFIX}{nbytes}").tolist()
    if rank == 0:
        return own
    return Segment.attach(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), writable=True)
