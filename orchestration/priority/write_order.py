"""The order in which one machine's writes leave: what comes again goes behind what waits, then by urgency of the unit.

`ArrivalOrder` is the other one, for comparison: what is there first leaves first, as if nothing were urgent.

A fast machine is in its next step while the last sums of the step before still wait for a slower one's link. By urgency
alone the next step, which begins with something urgent, would overtake them all; but it cannot complete a single sum
before the slower machine has joined in, and that one waits for what was overtaken. On links that are full this doubled
the time of a step. The engine sums in such an order too (``pyx/part.h``, for the same reason).
"""
from __future__ import annotations

from typing import NamedTuple

#: More partitions than there can be, and the bit for results.
_RANK_BITS = 32


class SendKey(NamedTuple):
    """A write's place among those of one machine: the lowest `order` leaves first; where it ties, the lowest `key`."""

    order: int
    key: int


class WriteOrder:
    """Gives each write of one machine its place. Owner thread only.

    Steps are not told apart by rounds, which each tensor counts for itself, but by passes: a partition joins the oldest
    pass that waits, or the one after the last that it was in. So a tensor that is pushed often yields to the others,
    and to nobody's harm one that is pushed seldom may overtake.
    """

    def __init__(self) -> None:
        self._newest = 0
        self._last: dict[int, int] = {}

    def enter(self, part: int, rank: int, is_result: bool, first_waiting: int | None) -> SendKey:
        """Return the place of *part*, whose partial or result is there, once for all whom it is sent to.

        *rank* is that of its unit's first partition (`rank_parts`): units leave by urgency. Within one, partials leave
        before results: nothing of it is complete before its last result is there, and a partial that waits behind
        results keeps another machine's link idle at the end. *first_waiting*: the lowest order that waits, if any does.
        """
        oldest = self._newest if first_waiting is None else first_waiting >> _RANK_BITS
        joined = max(oldest, self._last.get(part, 0) + 1)
        self._last[part] = joined
        self._newest = max(self._newest, joined)
        return SendKey(order_of(joined, rank, is_result), part)

    def forget(self, part: int) -> None:
        """Know nothing more of *part*: its number is to be another's."""
        self._last.pop(part, None)


class ArrivalOrder:
    """The same without urgency: to each machine, what was there first. Owner thread only."""

    def __init__(self) -> None:
        self._n_entered = 0

    def enter(self, part: int, rank: int, is_result: bool, first_waiting: int | None) -> SendKey:
        """Return the place of what comes after all that came before."""
        self._n_entered += 1
        return SendKey(0, self._n_entered)

    def forget(self, part: int) -> None:
        """Know nothing of *part*, as ever."""


def order_of(pass_: int, rank: int, is_result: bool) -> int:
    """Return the order of a write in the pass *pass_* whose unit has *rank*."""
    return pass_ << _RANK_BITS | rank << 1 | is_result


def urgency(order: int) -> int:
    """Return what writes of the same pass and unit have in common: lower is more urgent."""
    return order >> 1
