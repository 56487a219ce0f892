"""Segments of a device: memory that a rank has shared with its node, whose cards read and write it."""
from __future__ import annotations

from typing import NamedTuple

from ..base.free_list import FreeList
from ..orchestration.errors import UnsupportedError
from .device import SharedMemory


class DeviceSegment:
    """Segment *number* of this rank's node, memory of a device here; None: of another rank's, which it is not told."""

    def __init__(self, number: int, memory: SharedMemory | None, result_nbytes: int = 0) -> None:
        self.number = number
        self.memory = memory
        self.holes = FreeList(0 if memory is None else memory.nbytes - result_nbytes)
        self.begin = result_nbytes

    @property
    def address(self) -> int:
        """Where it begins on the device."""
        if self.memory is None:
            raise UnsupportedError("a sum lies in the memory of another rank's GPU, which hands it on")
        return self.memory.address


class DeviceRegion(NamedTuple):
    """*nbytes* of input memory on a device: what the node calls them, and where they are."""

    segment: DeviceSegment
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Where they begin on the device."""
        return self.segment.address + self.offset
