"""Tables of which a push has few rows: how rows are dealt to partitions, and how long frames are. Pure.

A tensor of the op "rows" is declared with the shape of the whole table, which nobody ever has in memory. Row r is row
r // n of partition r % n, of n: rows that are pushed often are neighbours in real tables, and would fill one range of
them. A partition is a frame (`pyx/rows.h`) of at most so many rows; a sum that has more says so instead.
"""
from __future__ import annotations

import math
from typing import NamedTuple

from ..errors import ConfigError, UnsupportedError

#: What `TensorSpec.op` says of such tensors.
ROWS = "rows"
#: In front of the indices: bytes that follow, number of rows, flags; 64 bits each.
HEADER_NBYTES = 24
#: The flag of a frame that had no room: its number of rows is what it would have needed.
OVERFLOW = 1
#: Bytes of an index.
INDEX_NBYTES = 4
#: Values begin at a multiple of this.
_ALIGNMENT = 64
#: Frames of as many bytes in all have two partitions or more, as dense tensors.
_SHARED_NBYTES = 1 << 20


class Deal(NamedTuple):
    """`n_parts` partitions, of which a frame has at most `frame_rows` rows."""

    n_parts: int
    frame_rows: int


def check(name: str, shape: tuple[int, ...], max_rows: int, group: str | None) -> None:
    """Raise `ConfigError` or `UnsupportedError` unless table *name* can be summed by rows, *max_rows* at once."""
    if not shape or 0 in shape[1:]:
        raise UnsupportedError(f"table {name!r} has shape {shape}: a table has rows, and these at least one element")
    if max_rows < 1:
        raise ConfigError(f"table {name!r}: a sum has room for max_rows={max_rows} rows; it must be 1 at least")
    if group is not None:
        raise ConfigError(f"table {name!r} is in group {group!r}, but what is summed by rows is fused with nothing")


def deal(n_rows: int, max_rows: int, row_nbytes: int, partition_nbytes: int) -> Deal:
    """Deal a table of *n_rows*, of which a sum has at most *max_rows*, to partitions of about *partition_nbytes*.

    Some partitions get more of those rows than others: there is room for four standard deviations more than the mean,
    if each row is as likely; and for all rows if *max_rows* are all.
    """
    if n_rows == 0:
        return Deal(0, 0)
    most = min(n_rows, max_rows)
    nbytes = most * (INDEX_NBYTES + row_nbytes)
    n_parts = max(-(-nbytes // partition_nbytes), 2 if nbytes >= _SHARED_NBYTES else 1, -(-n_rows >> 8 * INDEX_NBYTES))
    n_parts = min(n_parts, n_rows)
    mean = -(-most // n_parts)
    return Deal(n_parts, min(-(-n_rows // n_parts), mean + 4 * math.isqrt(mean) + 16))


def part_rows(n_rows: int, n_parts: int, index: int) -> int:
    """Return how many of *n_rows* partition *index* of *n_parts* has."""
    return -(-(n_rows - index) // n_parts)


def values_offset(n_rows: int) -> int:
    """Return where the values of a frame of *n_rows* begin."""
    return -(-(HEADER_NBYTES + INDEX_NBYTES * n_rows) // _ALIGNMENT) * _ALIGNMENT


def frame_nbytes(n_rows: int, row_nbytes: int) -> int:
    """Return the bytes of a frame of *n_rows* rows of *row_nbytes*."""
    return values_offset(n_rows) + n_rows * row_nbytes
