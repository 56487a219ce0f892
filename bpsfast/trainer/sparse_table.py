"""push_pull_rows: sums those few rows of a large table that have gradients, as for embeddings.

Only rows are sent and kept in memory, not the table. All ranks declare how many rows a sum has room for. If a sum has
more rows, all ranks see that in the result, and repeat it with a tensor that has more room.
"""
from __future__ import annotations

import time
from collections.abc import Iterator
from operator import index
from typing import Any, NamedTuple

import numpy as np

from ..base.dtypes import TABLE, wire_name
from ..orchestration.errors import BusyError, MismatchError, ProtocolError, UnsupportedError
from ..orchestration.messages import TensorSpec
from ..orchestration.placement.partition import (
    HEADER_NBYTES,
    INDEX_NBYTES,
    OVERFLOW,
    ROWS,
    part_rows,
    row_frame_nbytes,
    values_offset,
)
from . import process
from .arguments import flag
from .session import Session
from .tensor_input import host_input
from .unit import Unit

#: Room for rows by default: this part of the table (one of 64), and at least this many rows.
_PART, _LEAST = 64, 1024
Array = np.ndarray[Any, Any]
#: Sums that are computed at once: their rows stay in the caches.
_AT_ONCE = 4096


class SparseTable:
    """A table of *shape* (rows first) and *dtype*, whose rows are summed under *name*. One thread at a time; see
    `table_of`.

    Returns at once; the first `push` waits until all ranks have made theirs. *average*: as of `bpsfast.push_pull`;
    *max_rows*: how many different rows all ranks together push at once, about (0: one of 64).
    """

    def __init__(self, session: Session, name: str, shape: tuple[int, ...], dtype: Any, average: bool = True,
                 max_rows: int = 0) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.dtype = wire_name(dtype)
        self.average = average
        self._session = session
        self._max_rows = max_rows or max(_LEAST, self.shape[0] // _PART if self.shape else 0)
        self._n_grown = 0
        self._wire = name
        self._given: tuple[Array, Array] | None = None  # under way
        self._unit: Unit | None = None
        self._round = 0
        self._declare()

    @property
    def busy(self) -> bool:
        """Whether pushed rows were not waited for yet."""
        return self._given is not None

    def push(self, indices: Any, values: Any) -> None:
        """Begin to sum rows *values* (n, *row) with *indices* (n,), in any order; indices may repeat.

        Do not write either until `wait` has returned. Raises `BusyError` if the last ones were not waited for. Raises
        `MismatchError` or `UnsupportedError` if they are not rows of this table; nothing was pushed then.
        """
        if self._given is not None:
            raise BusyError(f"rows of {self.name!r} are pushed again, but the last ones were not waited for")
        given = _checked(self.name, self.shape, self.dtype, indices, values)
        self._push(given, self._session.settings.timeout_s)
        self._given = given

    def wait(self, timeout_s: float | None = None) -> tuple[Array, Array]:
        """Return the sum as new arrays: indices, ascending int64, and values.

        Raises as `push_pull_rows`; after a `StallError` it may be called again.
        """
        if self._given is None:
            raise MismatchError(f"rows of {self.name!r} are waited for, but none were pushed")
        timeout_s = self._session.settings.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            unit = self._unit or self._push(self._given, max(0.0, deadline - time.monotonic()))
            unit.wait(self._round, max(0.0, deadline - time.monotonic()))
            frames = self._frames(unit)
            memory = unit.view(self._round)
            needed = frames.needed(memory)
            if not needed:
                self._given = None
                return frames.read(memory)
            self._grow(unit, needed * frames.n_parts)

    def retire(self) -> bool:
        """Release name and memory, which are free as soon as all ranks have done so. Does not wait.

        Returns False, and does nothing, while not all ranks have declared the table or a sum is under way.
        """
        if self._session.closed:
            return True
        unit = self._session.tensors.unit_nowait(self._wire)
        if unit is None or (unit.in_flight and not unit.done(unit.round)):
            return False
        unit.finish(unit.round)
        self._session.retire([unit], releases_staging=True)
        return True

    def _declare(self) -> None:
        spec = TensorSpec(name=self._wire, dtype=self.dtype, shape=self.shape, average=self.average, op=ROWS,
                          max_rows=self._max_rows)
        self._session.tensors.declare([spec], lenient=True)

    def _push(self, given: tuple[Array, Array], timeout_s: float) -> Unit:
        unit = self._session.tensors.unit(self._wire, timeout_s)
        nbytes = self._frames(unit).write(unit.staging.array, *given) if unit.n_parts else 0
        self._round = unit.push(nbytes=nbytes)
        self._unit = unit
        return unit

    def _grow(self, old: Unit, n_rows: int) -> None:
        """Make room for *n_rows* or more. All ranks have seen the same sum and do the same."""
        self._max_rows = min(self.shape[0], max(n_rows + n_rows // 4, self._max_rows + self._max_rows // 2))
        self._unit = None
        self._session.retire([old], releases_staging=True)
        self._n_grown += 1
        self._wire = f"{self.name}~{self._n_grown}"
        self._declare()

    def _frames(self, unit: Unit) -> RowFrames:
        return RowFrames(self.shape[0], self.shape[1:], TABLE[self.dtype].numpy, unit.n_parts, unit.frame_rows,
                         unit.stride)


def _checked(name: str, shape: tuple[int, ...], dtype: str, indices: Any, values: Any) -> tuple[Array, Array]:
    """Return both as arrays of rows of the table *name* of this *shape* and *dtype*."""
    places = np.asarray(indices)
    if places.size and places.dtype.kind not in "iu":
        raise UnsupportedError(f"indices of rows of {name!r} are of dtype {places.dtype}, not integers")
    rows = host_input(values).array()
    if places.ndim != 1 or rows.shape != (len(places), *shape[1:]) or wire_name(rows.dtype) != dtype:
        raise MismatchError(f"rows of {name!r}, a table of shape {shape} and dtype {dtype}: indices are of shape "
                            f"{places.shape}, values of shape {rows.shape} and dtype {rows.dtype}")
    outside = places[(places < 0) | (places >= shape[0])]
    if len(outside):
        raise MismatchError(f"{name!r} has rows 0 to {shape[0] - 1}; index {outside[0]} was pushed")
    return places.astype(np.int64, copy=False), rows


def sparse_tables(session: Session) -> dict[str, SparseTable]:
    """Return the tables of *session* by name (`Session.extension`)."""
    return {}


def table_of(session: Session, name: str, shape: tuple[int, ...], dtype: Any, average: bool = True,
             max_rows: int = 0) -> SparseTable:
    """Return this rank's table *name*, made by the first call; raise `MismatchError` if with other parameters."""
    tables = session.extension(sparse_tables)
    table = tables.get(name)
    if table is None:
        table = tables[name] = SparseTable(session, name, shape, dtype, average, max_rows)
    if (table.shape, table.dtype, table.average) != (tuple(shape), wire_name(dtype), average):
        raise MismatchError(f"table {name!r} is of shape {table.shape}, dtype {table.dtype}, average={table.average}; "
                            f"now of shape {shape}, dtype {dtype}, average={average}: use one name for one table")
    return table


def push_pull_rows(indices: Any, values: Any, n_rows: int, name: str | None = None, average: bool = True,
                   max_rows: int = 0) -> tuple[Array, Array]:
    """Return the sums (or means) over all ranks of those rows of a table that some rank has pushed.

    Parameters
    ----------
    indices
        (n,) integers from 0 to *n_rows* - 1, in any order; n may differ from rank to rank and call to call, and be 0.
        Rows with the same index are added.
    values
        (n, ...): the rows, C-contiguous, of the same shape and dtype on all ranks (what `bpsfast.push_pull` takes).
    n_rows
        Rows of the table, which need not exist in memory.
    name
        As of `bpsfast.push_pull`.
    average
        Divide by the number of ranks, not by the number of ranks that have pushed a row.
    max_rows
        About how many different rows all ranks together push in a call. If there are more, that sum is repeated with
        more room. 0: one of 64. Fixed by the first use of the name.

    Returns
    -------
    (indices, values), new arrays: ascending int64, and a row for each.

    Raises
    ------
    UnsupportedError, MismatchError
        If the arrays are not rows of such a table, or ranks or two uses of *name* differ in anything but n.
    CapacityError
        If there is no memory for this many rows.
    ClosedError, StallError, PeerLostError
        See there.
    """
    session = process.current()
    rows = host_input(values)
    if not rows.shape:
        raise MismatchError(f"values of rows have the shape (n, ...), got a scalar of dtype {rows.dtype}")
    average, shape = flag(average), (index(n_rows), *rows.shape[1:])
    if name is None:
        _checked("auto.rows", shape, rows.dtype, indices, values)  # a failed call must not take a number
        name = session.tensors.unnamed("auto.rows")
    table = table_of(session, name, shape, rows.dtype, average, max_rows)
    table.push(indices, rows.owner if isinstance(rows.owner, np.ndarray) else values)
    return table.wait()


class RowFrames(NamedTuple):
    """The frames of a table: one for each of `n_parts` partitions, `stride` bytes apart. Format: `pyx/rows.h`.

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
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    def write(self, memory: Array, indices: Array, values: Array) -> int:
        """Write rows *values* (n, *row_shape) with *indices* (n,) int64 into *memory*, uint8; return the frames' bytes.

        Rows with one index are added first, in their order, in the dtype's accumulator. A partition with more rows than
        a frame has room for gets a frame that only tells how many.
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
                # mode="clip": else NumPy would make a copy to check the indices
                np.take(values, order[begin:end], axis=0, out=self._values(frame, n), mode="clip")
        return nbytes

    def needed(self, memory: Array) -> int:
        """Return how many rows the fullest frame of a sum in *memory* should have had; 0: all frames had room."""
        heads = (self._head(memory, part) for part in range(self.n_parts))
        return max((n for n, flags in heads if flags == OVERFLOW), default=0)

    def read(self, memory: Array) -> tuple[Array, Array]:
        """Return (indices, values) of the sum in *memory* as new arrays, ascending; `ProtocolError`: no such frames."""
        found = [self._indices(memory, part) for part in range(self.n_parts)]
        indices = np.concatenate([np.empty(0, np.int64), *(own.astype(np.int64) * self.n_parts + part
                                                           for part, own in enumerate(found))])
        total = len(indices)
        order = np.argsort(indices, kind="stable") if self.n_parts > 1 else np.arange(total)
        values = np.empty((total, *self.row_shape), self.dtype)
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
        """Return the distance of the partitions' keys in `_deal`."""
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
