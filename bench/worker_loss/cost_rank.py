"""One rank of the jobs whose steps `bench worker_loss` times: a process of a contestant, with sums in place.

    python -m bpsfast.bench.worker_loss.cost_rank SOCKET
"""
from __future__ import annotations

import sys

import numpy as np

import bpsfast
from bpsfast.bench.harness import contestant, pattern
from bpsfast.bench.harness.bpsfast_rank import BpsfastRank
from bpsfast.bench.harness.contestant import Operation

from .cost import IN_PLACE

_KIND = "worker_loss"


class CostRank(BpsfastRank):
    """A rank with one more operation, `IN_PLACE`."""

    def operation(self, variant: str, nbytes: int) -> Operation:
        if variant != IN_PLACE:
            return super().operation(variant, nbytes)
        array, name = np.zeros(nbytes // 4, np.float32), f"{IN_PLACE} {nbytes}"
        return pattern.operation(lambda: bpsfast.push_pull(array, False, name, None, array), array, self.rank,
                                 self.size)


def main(arguments: list[str]) -> int:
    """Run one process of a contestant until the coordinator closes the connection."""
    contestant.KINDS[_KIND] = ("worker_loss.cost_rank", CostRank.__name__)
    return contestant.main([_KIND, arguments[0], "{}"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
