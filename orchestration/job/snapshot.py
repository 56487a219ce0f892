"""What a job has come to under the schedulers before, as far as a new one has to know it. Pure; `JobRebuild` finds it.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import BpsError
from ..messages import Message, Succession, UnitPlan
from ..roster import Roster


@dataclass(frozen=True)
class JobSnapshot:
    """Where a job goes on. `roster` knows who is lost and from where the others are heard; `absent` are lost by now.

    `generation`: no higher number was heard of. `frozen`: a recovery was under way. `rates`: of all NICs, as placement
    counts on them; `unmeasured` nodes have not said theirs. `answers`: by node, what it has missed, in order; `later`:
    what nodes have said besides, in order, with their indices.
    """

    roster: Roster
    job: str
    epoch: int
    absent: Sequence[int]
    frozen: bool
    generation: int
    next_unit: int
    units: Sequence[UnitPlan]
    lent: Mapping[int, Succession]
    gone_from: Mapping[int, Sequence[int]]
    failed: Mapping[str, BpsError]
    n_declared: int
    barrier: int
    rates: Sequence[float]
    unmeasured: Sequence[int]
    ownable_nbytes: Sequence[int]
    answers: Mapping[int, Sequence[Message]]
    later: Sequence[tuple[int, Message]]

    @property
    def lost(self) -> set[int]:
        """All nodes that are lost, those included that are so by now."""
        return {*self.roster.lost, *self.absent}

    @property
    def committed(self) -> list[str]:
        """The names of all committed tensors, each once."""
        return list(dict.fromkeys(member.name for unit in self.units for member in unit.members))
