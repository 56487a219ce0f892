"""The order in which one machine's writes leave: those of an older pass first, then by urgency of their unit.

A fast machine is in its next pass while the last sums of the pass before still wait for a slower one's link. By urgency
alone the next pass, which begins with something urgent, would overtake them all; but it cannot complete a single sum
before the slower machine has joined in, and that one waits for what was overtaken. On links that are full this doubled
the time of a step.
"""
from __future__ import annotations

#: More partitions than there can be, and the bit for results.
_RANK_BITS = 32


class WriteOrder:
    """Gives each write of one machine its order, a number that is to be sent before all higher ones. Owner thread only.

    A pass ends when a partition comes that it has had already. Rounds would not do: each tensor counts its own.
    """

    def __init__(self) -> None:
        self._pass = 0
        self._last: dict[int, int] = {}

    def enter(self, part: int, rank: int, is_result: bool) -> int:
        """Return the order of *part*, whose partial or result is there, once for all whom it is sent to.

        *rank* is that of its unit's first partition (`rank_parts`): units leave by urgency. Within one, partials leave
        before results: nothing of it is complete before its last result is there, and a partial that waits behind
        results keeps another machine's link idle at the end.
        """
        if self._last.get(part) == self._pass:
            self._pass += 1
        self._last[part] = self._pass
        return self._pass << _RANK_BITS | rank << 1 | is_result


def urgency(order: int) -> int:
    """Return what writes of the same pass and unit have in common: lower is more urgent."""
    return order >> 1
