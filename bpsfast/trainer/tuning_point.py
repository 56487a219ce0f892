"""What a running job can change: how gradients are cut and packed, how much is under way, on how many streams. Pure."""
from __future__ import annotations

import math
from typing import NamedTuple

#: Partitions under way to one peer from which on more make no difference.
_MOST = 256.0


class TuningPoint(NamedTuple):
    """Bytes: of a partition at most, of a fused group at most, under way to one peer; tcp connections to it."""

    partition_nbytes: int
    fusion_nbytes: int
    credit_nbytes: int
    n_streams: int

    @property
    def cut(self) -> tuple[int, int, int]:
        """What a change of which needs another edition of the gradients."""
        return self.partition_nbytes, self.fusion_nbytes, self.n_streams

    @property
    def place(self) -> tuple[float, ...]:
        """Where it lies for the search: log2 of partition, of fusion, of credit in partitions; half that of streams,
        which mostly matter least.
        """
        return (math.log2(self.partition_nbytes), math.log2(max(1, self.fusion_nbytes)),
                math.log2(min(max(1.0, self.credit_nbytes / self.partition_nbytes), _MOST)),
                math.log2(self.n_streams) / 2)

    def __str__(self) -> str:
        return (f"partitions of {_short(self.partition_nbytes)}, fusion {_short(self.fusion_nbytes)}, credit "
                f"{_short(self.credit_nbytes)}, {self.n_streams} streams")


def _short(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 10**6 else f"{nbytes / 1e3:.3g} KB"
