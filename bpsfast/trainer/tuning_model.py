"""What the planner expects of a point, where NICs' rates are known: where a search begins. Pure.

The time on the wire of the optimum (`orchestration.placement.shares`), a partition at either end of it that nothing
overlaps, and a cost for each write: the trade-off of ByteScheduler (SOSP'19) section 4. Only proportions count.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..orchestration.placement.shares import Machine, least_time_s
from .tuning_point import TuningPoint

#: Python decides on every write of a node: what that took per partition and peer on a busy machine.
_WRITE_S = 40e-6


def expectation(machines: Sequence[Machine], sizes: Sequence[int]) -> Callable[[TuningPoint], float]:
    """Return what tells the expected relative step time of a point for tensors of *sizes* bytes on *machines*.

    Of machines whose rates are not all known nothing is expected: 1.0 everywhere.
    """
    if not all(machine.rate > 0 for machine in machines) or len(machines) < 2 or not any(sizes):
        return lambda point: 1.0
    wire_s = least_time_s(machines, sum(sizes))
    rate = min(machine.rate for machine in machines)
    n_peers = len(machines) - 1

    def expected(point: TuningPoint) -> float:
        fused = sum(nbytes for nbytes in sizes if nbytes < point.fusion_nbytes)
        n_units = math.ceil(fused / max(1, point.fusion_nbytes))
        n_parts = n_units + sum(math.ceil(nbytes / point.partition_nbytes) for nbytes in sizes
                                if nbytes >= point.fusion_nbytes)
        grain = min(point.partition_nbytes, max(sizes))
        return wire_s + 2 * grain / rate + n_parts * n_peers * _WRITE_S

    return expected
