"""push_pull_rows: sum the few rows of a large table that have gradients, as embeddings have them.

What travels, and lies in memory, are rows; the table itself nobody needs. All ranks declare for how many rows a sum
has room. One that has more says so on all of them, and is made again: a tensor with more room takes the place of the
old one.
"""
from __future__ import annotations

import time
from operator import index
from typing import Any

import numpy as np

from ..base.dtypes import TABLE, wire_name
from ..orchestration.errors import BusyError, MismatchError, UnsupportedError
from ..orchestration.messages import TensorSpec
from ..orchestration.placement.partition import ROWS
from . import process
from .arguments import flag
from .row_frames import Array, RowFrames
from .session import Session
from .tensor_input import host_input
from .unit import Unit

#: Room for rows if nobody says how many there will be: a part of the table, and at least so many.
_PART, _LEAST = 64, 1024


class SparseTable:
    """A table of *shape* (rows first) and *dtype*, whose rows are summed under *name*. One thread at a time; made by
    `table_of`.

    Returns at once; the first `push` waits until all ranks have made theirs. *average*, *priority*: as of
    `bpsfast.push_pull`; *max_rows*: how many different rows all ranks together push at once, about (0: one of 64).
    """

    def __init__(self, session: Session, name: str, shape: tuple[int, ...], dtype: Any, average: bool = True,
                 max_rows: int = 0, priority: int | None = None) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.dtype = wire_name(dtype)
        self.average = average
        self._session = session
        self._priority = priority
        self._max_rows = max_rows or max(_LEAST, self.shape[0] // _PART if self.shape else 0)
        self._n_editions = 0
        self._wire = name
        self._given: tuple[Array, Array] | None = None  # under way
        self._unit: Unit | None = None
        self._round = 0
        self._declare()

    @property
    def busy(self) -> bool:
        """Whether rows were pushed, and not waited for."""
        return self._given is not None

    def push(self, indices: Any, values: Any) -> None:
        """Begin to sum rows *values* (n, *row) with *indices* (n,), in any order, of which some may be the same.

        Neither may be written until `wait` has returned.

        Raises
        ------
        BusyError
            If the last ones were not waited for.
        MismatchError, UnsupportedError
            If they are no rows of this table. Then nothing is under way.
        """
        if self._given is not None:
            raise BusyError(f"rows of {self.name!r} are pushed again, but the last ones were not waited for")
        given = _checked(self.name, self.shape, self.dtype, indices, values)
        self._push(given, self._session.settings.timeout_s)
        self._given = given

    def wait(self, timeout_s: float | None = None) -> tuple[Array, Array]:
        """Return the sum as new arrays: indices, ascending int64, and values.

        Raises as `push_pull_rows`; after a `StallError` it may be waited for again.
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
        """Give up name and memory for good, which are others' as soon as all ranks have done so. Waits for no rank.

        Returns False, and gives up nothing, while that is not possible: ranks have not all declared the table, or a sum
        is under way.
        """
        if self._session.closed:
            return True
        unit = self._session.tensors.unit_nowait(self._wire)
        if unit is None or (unit.in_flight and not unit.done(unit.round)):
            return False
        unit.finish(unit.round)
        staging = unit.staging if unit.has_staging else None
        self._session.retire([unit])
        if staging is not None:
            self._session.memory.release(staging)
        return True

    # -- innards ---------------------------------------------------------------------------------------------------

    def _declare(self) -> None:
        self._session.tensors.declare([TensorSpec(
            name=self._wire, dtype=self.dtype, shape=self.shape, average=self.average, priority=self._priority, op=ROWS,
            max_rows=self._max_rows)], lenient=True)

    def _push(self, given: tuple[Array, Array], timeout_s: float) -> Unit:
        unit = self._session.tensors.unit(self._wire, timeout_s)
        nbytes = self._frames(unit).write(unit.staging.array, *given) if unit.n_parts else 0
        self._round = unit.push_staging(nbytes)
        self._unit = unit
        return unit

    def _grow(self, old: Unit, n_rows: int) -> None:
        """Have room for *n_rows*, or more, from now on. All ranks have seen the same sum, and do the same."""
        self._max_rows = min(self.shape[0], max(n_rows + n_rows // 4, self._max_rows + self._max_rows // 2))
        staging, self._unit = old.staging, None
        self._session.retire([old])
        self._session.memory.release(staging)
        self._n_editions += 1
        self._wire = f"{self.name}~{self._n_editions}"
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


def table_of(session: Session, name: str, shape: tuple[int, ...], dtype: Any, average: bool = True,
             max_rows: int = 0) -> SparseTable:
    """Return the table that this rank has under *name*, a new one at first; parameters are `SparseTable`'s.

    Raises
    ------
    MismatchError
        If it is another one.
    """
    table = session.row_tables.get(name)
    if table is None:
        table = session.row_tables[name] = SparseTable(session, name, shape, dtype, average, max_rows)
    if (table.shape, table.dtype, table.average) != (tuple(shape), wire_name(dtype), average):
        raise MismatchError(f"table {name!r} is of shape {table.shape}, dtype {table.dtype}, average={table.average}; "
                            f"now of shape {shape}, dtype {dtype}, average={average}: use one name for one table")
    return table


def push_pull_rows(indices: Any, values: Any, n_rows: int, name: str | None = None, average: bool = True,
                   max_rows: int = 0) -> tuple[Array, Array]:
    """Return the sum, or the mean, of rows of a table over all ranks: only those that some rank has pushed.

    Parameters
    ----------
    indices
        (n,) integers from 0 to *n_rows* - 1, in any order; n may differ from rank to rank and call to call, and be 0.
        Rows with the same index are added up.
    values
        (n, ...): the rows, C-contiguous, of the same shape and dtype on all ranks (what `bpsfast.push_pull` takes).
    n_rows
        Rows of the table, which nobody needs to have in memory.
    name
        As of `bpsfast.push_pull`.
    average
        Divide by the number of ranks, not by that of ranks that have pushed a row.
    max_rows
        How many different rows all ranks together push in a call, about: there will be room for more if needed, by
        making that sum again. 0: one of 64. Fixed by the first use of the name.

    Returns
    -------
    (indices, values), new arrays: ascending int64, and a row for each.

    Raises
    ------
    UnsupportedError, MismatchError
        If the arrays are no rows of such a table, or ranks, or two uses of *name*, differ in anything but n.
    CapacityError
        If there is no memory for so many rows.
    ClosedError, StallError, PeerLostError
        See there.
    """
    session = process.current()
    rows = host_input(values)
    if not rows.shape:
        raise MismatchError(f"values of rows have the shape (n, ...), got a scalar of dtype {rows.dtype}")
    average, shape = flag(average), (index(n_rows), *rows.shape[1:])
    if name is None:
        _checked("auto.rows", shape, rows.dtype, indices, values)  # a call that fails must not take a number
        name = session.tensors.unnamed("auto.rows")
    table = table_of(session, name, shape, rows.dtype, average, max_rows)
    table.push(indices, rows.owner if isinstance(rows.owner, np.ndarray) else values)
    return table.wait()
