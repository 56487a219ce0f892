"""A unit's bytes on a device, by partitions: what is copied together, and announced, or brought back, together."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DeviceRange(NamedTuple):
    """*nbytes* at *address* of a device, which are the unit's from *offset* on."""

    offset: int
    address: int
    nbytes: int


class PartitionCopy(NamedTuple):
    """Partition *number* of a unit, *nbytes* long, and the copies that fill it (none: it is in its place)."""

    number: int
    nbytes: int
    copies: tuple[DeviceRange, ...]


def cut(nbytes: int, stride: int, loads: Sequence[DeviceRange]) -> list[PartitionCopy]:
    """Return the partitions, *stride* bytes apart, of a unit of *nbytes*, in order; *loads* are within it, in any
    order.
    """
    copies: dict[int, list[DeviceRange]] = {}
    for load in sorted(loads):
        at, end = load.offset, load.offset + load.nbytes
        while at < end:
            number = at // stride
            n = min(end, (number + 1) * stride) - at
            copies.setdefault(number, []).append(DeviceRange(at, load.address + at - load.offset, n))
            at += n
    return [PartitionCopy(number, min(stride, nbytes - number * stride), tuple(copies.get(number, ())))
            for number in range(-(-nbytes // stride))]
