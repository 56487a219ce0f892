"""Where the results of a unit lie, run by run, as its node's extents say."""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..gpu.device import DeviceSegment
from ..orchestration.errors import ProtocolError
from ..orchestration.messages import UnitReady
from ..pyx.pages import Segment

#: A segment in the memory of another rank's device.
_ELSEWHERE = DeviceSegment(-1, None)


class ResultRun(NamedTuple):
    """Consecutive result bytes of the unit inside one segment; offsets by round parity."""

    begin: int
    end: int
    segment: Segment | DeviceSegment
    offsets: tuple[int, int]


def runs(ready: UnitReady, segments: Mapping[tuple[str, int], Segment], on_device: Mapping[int, DeviceSegment]
         ) -> list[ResultRun]:
    """Turn the extents into runs, joined where one continues the other in both parities. *on_device*: by its number,
    what this rank has shared of its device; what lies in another rank's is in a segment without memory.
    """
    found: list[ResultRun] = []
    begin = 0
    for extent in ready.extents:
        segment: Segment | DeviceSegment | None = segments.get((f"result:{extent.node}", extent.segment))
        if extent.on_device:
            segment = on_device.get(extent.segment, _ELSEWHERE)
        if segment is None:
            raise ProtocolError(f"results of {ready.plan.name!r} lie in segment {extent.segment} of node "
                                f"{extent.node}, which the node has not shared with this rank")
        end = min(begin + extent.nbytes, ready.plan.nbytes)
        offsets = (extent.offset_even, extent.offset_odd)
        last = found[-1] if found else None
        follows = last is not None and last.segment is segment and offsets == tuple(
            offset + last.end - last.begin for offset in last.offsets)
        if last is not None and follows:
            found[-1] = last._replace(end=end)
        else:
            found.append(ResultRun(begin, end, segment, offsets))
        begin = end
    if begin != ready.plan.nbytes:
        raise ProtocolError(f"results of {ready.plan.name!r} cover {begin} of {ready.plan.nbytes} bytes")
    return found
