"""Where the input of a unit lies when its tensors come from a device: on the host, or in memory that cards read."""
from __future__ import annotations

from typing import NamedTuple

from ..gpu.device import DeviceRegion
from ..pyx.pages import Segment
from .input_memory import Region


class DeviceInput(NamedTuple):
    """The partitions of a unit, *stride* bytes apart in *staging*; those in *straight* are at these bytes of *place*.

    None: no partition lies there.
    """

    staging: Region | None
    place: DeviceRegion | None
    straight: dict[int, int]
    stride: int

    def entry(self, number: int) -> tuple[int, int]:
        """Return segment and offset of partition *number*, as the node calls them."""
        at = self.straight.get(number)
        if at is not None:
            assert self.place is not None, "it lies there"
            return self.place.segment.number, self.place.offset + at
        assert self.staging is not None, "it lies there"
        return self.staging.segment, self.staging.offset + number * self.stride

    @property
    def address(self) -> int:
        """Where the unit begins on the host; 0: nothing of it lies there."""
        return self.staging.address if self.staging is not None else 0

    @property
    def on_device(self) -> dict[int, int]:
        """Return of each partition on the device where the unit would begin there, did it lie around it."""
        if self.place is None:
            return {}
        return {number: self.place.address + at - number * self.stride for number, at in self.straight.items()}

    def segments(self, of: dict[tuple[str, int], Segment]) -> list[Segment]:
        """Return the segments of the host that it lies in, of those that this rank has mapped."""
        return [] if self.staging is None else [of["rank", self.staging.segment]]
