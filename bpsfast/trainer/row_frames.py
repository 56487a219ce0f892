"""Rows in and out of frames: what a rank pushes of a table, and what it reads of the sum. The format: `pyx/rows.h`."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..base.dtypes import TABLE, wire_name
from ..orchestration.errors import ProtocolError
from ..orchestration.placement.partition import (
    HEADER_NBYTES,
    INDEX_NBYTES,
    OVERFLOW,
    part_rows,
    row_frame_nbytes,
    values_offset,
)

Array = np.ndarray[Any, Any]


class RowFrames(NamedTuple):
    """How the frames of a table lie: one for each of `n_parts` partitions, `stride` bytes apart.

    `n_rows` of the table, `row_shape` and `dtype` of a row; a frame has at most `frame_rows`.
    """

    n_rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    n_parts: int
    frame_rows: int
    stride: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    def write(self, memory: Array, indices: Array, values: Array) -> int:
        """Write rows *values* (n, *row_shape) with *indices* (n,) int64 into *memory*, uint8; return the frames' bytes.

        Rows of one index are added up first, in the order in which they come, in the dtype's accumulator. A partition
        that gets more rows than a frame has says how many, and has none.
        """
        places, order, values = self._deal(indices, values)
        row_nbytes, nbytes = self.row_nbytes, 0
        ends = np.searchsorted(places, self._stretch * np.arange(1, self.n_parts + 1))
        for part, (begin, end) in enumerate(zip([0, *ends[:-1]], ends)):
            n = int(end - begin)
            frame = memory[part * self.stride : (part + 1) * self.stride]
            fits = n <= self.frame_rows
            length = row_frame_nbytes(n, row_nbytes) if fits else HEADER_NBYTES
            frame[:HEADER_NBYTES].view(np.uint64)[:] = length - 8, n, 0 if fits else OVERFLOW
            nbytes += length
            if fits and n:
                own = frame[HEADER_NBYTES : HEADER_NBYTES + INDEX_NBYTES * n].view(np.uint32)
                own[:] = places[begin:end] - part * self._stretch
                # no check of the order, which is ours: with it NumPy would take a copy
                np.take(values, order[begin:end], axis=0, out=self._values(frame, n), mode="clip")
        return nbytes

    def needed(self, memory: Array) -> int:
        """Return the most rows that a sum in *memory* lacked room for in a frame; 0: there was room for all."""
        heads = (self._head(memory, part) for part in range(self.n_parts))
        return max((n for n, flags in heads if flags == OVERFLOW), default=0)

    def read(self, memory: Array) -> tuple[Array, Array]:
        """Return (indices, values) of the sum in *memory*, uint8, as new arrays, by ascending index.

        Raises
        ------
        ProtocolError
            If what is there are no such frames.
        """
        found = [self._indices(memory, part) for part in range(self.n_parts)]
        total = sum(map(len, found))
        indices = np.empty(total, np.int64)
        values = np.empty((total, *self.row_shape), self.dtype)
        begin = 0
        for part, own in enumerate(found):
            indices[begin : begin + len(own)] = own.astype(np.int64) * self.n_parts + part
            begin += len(own)
        order = np.argsort(indices, kind="stable") if self.n_parts > 1 else np.arange(total)
        place = np.empty(total, np.int64)
        place[order] = np.arange(total)
        begin = 0
        for part, own in enumerate(found):
            frame = memory[part * self.stride : (part + 1) * self.stride]
            values[place[begin : begin + len(own)]] = self._values(frame, len(own))
            begin += len(own)
        return indices[order], values

    @property
    def _stretch(self) -> int:
        """Return how far the places of partitions are apart in `_deal`."""
        return -(-self.n_rows // self.n_parts)

    def _deal(self, indices: Array, values: Array) -> tuple[Array, Array, Array]:
        """Return distinct places (partition by partition, ascending), which of the returned values belongs to each."""
        keys = indices if self.n_parts == 1 else indices % self.n_parts * self._stretch + indices // self.n_parts
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        firsts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else keys
        if len(firsts) == len(keys):
            return keys, order, values
        sums = np.empty((len(firsts), *self.row_shape), self.dtype)
        for chosen, total in _added_up(values, order, firsts):
            sums[chosen] = total
        return keys[firsts], np.arange(len(firsts)), sums

    def _values(self, frame: Array, n: int) -> Array:
        begin = values_offset(n)
        return frame[begin : begin + n * self.row_nbytes].view(self.dtype).reshape(n, *self.row_shape)

    def _head(self, memory: Array, part: int) -> tuple[int, int]:
        """Return number of rows and flags of a frame, which fit together."""
        head = memory[part * self.stride : part * self.stride + HEADER_NBYTES].view(np.uint64)
        following, n, flags = (int(word) for word in head)
        overflows = flags == OVERFLOW
        most = part_rows(self.n_rows, self.n_parts, part) if overflows else self.frame_rows
        if flags not in (0, OVERFLOW) or n > most or following != (
                HEADER_NBYTES if overflows else row_frame_nbytes(n, self.row_nbytes)) - 8:
            raise ProtocolError(f"partition {part} of {self.n_parts} of a table is no frame of at most "
                                f"{self.frame_rows} rows: {following} bytes follow for {n} rows, flags {flags}")
        return n, flags

    def _indices(self, memory: Array, part: int) -> Array:
        n, flags = self._head(memory, part)
        begin = part * self.stride + HEADER_NBYTES
        found = memory[begin : begin + INDEX_NBYTES * n].view(np.uint32)
        most = part_rows(self.n_rows, self.n_parts, part)
        if flags or (n and (found[-1] >= most or bool((found[1:] <= found[:-1]).any()))):
            raise ProtocolError(f"partition {part} of {self.n_parts} of a table has {n} rows whose indices do not "
                                f"ascend below {most}")
        return found


def _added_up(values: Array, order: Array, firsts: Array) -> Iterator[tuple[Array, Array]]:
    """Yield (which sums, their values): *order* lists the terms of all sums, each sum's from its place in *firsts* on.

    The k-th terms of all sums are added at once, so that each sum takes its terms in their order.
    """
    n_terms = np.diff(np.append(firsts, len(order)))
    wide = TABLE[wire_name(values.dtype)].accumulator
    by_terms = np.argsort(-n_terms, kind="stable")
    for chosen in np.array_split(by_terms, -(-len(by_terms) // _AT_ONCE)):
        total = values[order[firsts[chosen]]].astype(wide)
        for k in range(1, int(n_terms[chosen[0]])):
            n_more = int(np.searchsorted(-n_terms[chosen], -k, side="left"))  # which have a term k: the first ones
            total[:n_more] += values[order[firsts[chosen[:n_more]] + k]].astype(wide)
        yield chosen, total.astype(values.dtype)


#: Sums that are made at once: their rows stay in the caches.
_AT_ONCE = 4096
