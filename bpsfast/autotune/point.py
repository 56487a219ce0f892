"""What a running job can change: how gradients are cut, how they are packed, how much is under way. Pure."""
from __future__ import annotations

import math
from typing import NamedTuple

#: Partitions under way to one peer from which on more make no difference.
_MOST = 256.0


class Point(NamedTuple):
    """Bytes: of a partition at most, of a fused group at most, under way to one peer."""

    partition_nbytes: int
    fusion_nbytes: int
    credit_nbytes: int

    @property
    def cut(self) -> tuple[int, int]:
        """What a change of which needs another edition of the gradients."""
        return self.partition_nbytes, self.fusion_nbytes

    @property
    def place(self) -> tuple[float, float, float]:
        """Where it lies for the search: log2 of partition, of fusion, and of credit in partitions."""
        return (math.log2(self.partition_nbytes), math.log2(max(1, self.fusion_nbytes)),
                math.log2(min(max(1.0, self.credit_nbytes / self.partition_nbytes), _MOST)))

    def __str__(self) -> str:
        return (f"partitions of {_short(self.partition_nbytes)}, fusion {_short(self.fusion_nbytes)}, credit "
                f"{_short(self.credit_nbytes)}")


def _short(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 10**6 else f"{nbytes / 1e3:.3g} KB"
