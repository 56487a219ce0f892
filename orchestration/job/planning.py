"""Plans the sums of tensors that all ranks have declared, one generation at a time, until they are retired. Pure.

`Job` calls it, and defers messages while nodes change. Nothing is planned while NICs are being measured, on which
placement depends, or while the job recovers from a loss.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence

from .. import messages as m
from ..errors import BpsError, CapacityError, ProtocolError
from ..roster import Roster
from .declarations import Declarations, FailedNames
from .generations import Generations
from .node_losses import NodeLosses


class GenerationPlanner:
    """Plans for one job, once all nodes have joined. Parameters are the `Job`'s own objects, which change.

    Its exceptions end the job.
    """

    def __init__(self, roster: Roster, declarations: Declarations, generations: Generations, losses: NodeLosses,
                 unmeasured: Collection[int]) -> None:
        self._roster = roster
        self._declarations = declarations
        self._generations = generations
        self._losses = losses
        self._unmeasured = unmeasured
        self._held: list[tuple[bytes, m.Declare]] = []

    def declare(self, sender: bytes, message: m.Declare) -> m.Outgoing:
        """Take a rank's declaration; plan what is complete, and tell the ranks concerned what never will be."""
        if self._generations.is_retiring(message.rank, message.tensors):
            self._held.append((sender, message))  # the names are free once all ranks have retired them
            return []
        out: m.Outgoing = []
        for failed in self._declarations.add(message.rank, message.tensors, message.positions, message.digest):
            out += _declare_failed(failed, self._roster.senders_of(failed.ranks))
        return out + self.plan()

    def plan(self) -> m.Outgoing:
        """Begin a generation with all complete declarations, unless one is in progress or has to wait."""
        if self._generations.in_flight is not None or self._unmeasured or self._losses.recovery is not None:
            return []
        lost = self._roster.lost_ranks
        specs = [spec for spec in self._losses.take_withdrawn()
                 if not spec.ranks or not lost.issuperset(spec.ranks)] or self._declarations.take_complete()
        if not specs:
            return []
        try:
            return self._roster.to_all(self._generations.propose(specs))
        except BpsError as exc:
            return self._give_up([spec.name for spec in specs], exc) + self.plan()

    def ready(self, index: int, generation: int) -> m.Outgoing:
        """Note that node *index* is prepared; after the last one, commit, and plan what comes next."""
        commit = self._generations.ready(index, generation)
        return [] if commit is None else self._roster.to_all(commit) + self.plan()

    def prepare_failed(self, now: float, sender: bytes, message: m.PrepareFailed) -> m.Outgoing:
        """Give up what a node cannot prepare, and tell all ranks why.

        If it was to own partitions of lost nodes and lacks memory, others get more of them. Raises `CapacityError` if
        partitions of lost nodes have no other owner.
        """
        index = self._roster.index_of(sender)
        self._generations.can_own(index, message.ownable_nbytes)
        names = self._generations.abandon(message.generation)
        recovery, name = self._losses.recovery, self._roster.describe_node(index)
        if recovery is not None and message.generation == recovery.generation:
            if recovery.joined:
                return self._losses.restart_without_share(now, f"{name} cannot prepare for that: {message.reason}")
            if message.room_nbytes >= 0 and self._losses.limit_share(index, message.room_nbytes):
                return self._losses.restart(now)
            raise CapacityError(f"{name} cannot go on without what the job has lost ({recovery.reason}): "
                                f"{message.reason}")
        if not names:
            return []
        error = CapacityError(f"{name} cannot prepare generation {message.generation}: {message.reason}")
        return self._give_up(names, error) + self.plan()

    def retire(self, message: m.Retire) -> m.Outgoing:
        """Once all ranks have retired units, let all nodes free them, before any later plan.

        Raises `ProtocolError` if there is no such unit.
        """
        over, unknown = self._generations.retire(message.rank, message.units, self._roster.size,
                                                 self._roster.lost_ranks)
        if unknown:
            raise ProtocolError(f"{self._roster.describe(f'rank {message.rank}')} retires units {unknown}, which are "
                                "not committed, or were retired before")
        return self._retired(over)

    def rank_lost(self) -> m.Outgoing:
        """Plan and retire what waited only for ranks that are lost. After the commit of that loss."""
        self._declarations.rank_lost()
        return self._retired(self._generations.retire_without(self._roster.size, self._roster.lost_ranks))

    def _retired(self, over: Sequence[m.UnitPlan]) -> m.Outgoing:
        """Let all nodes free what is *over*."""
        if not over:
            return []
        names = dict.fromkeys(member.name for unit in over for member in unit.members)
        self._declarations.forget([name for name in names if not self._generations.is_committed(name)])
        out = self._roster.to_all(m.Retired(units=tuple(unit.unit for unit in over)))
        held, self._held = self._held, []
        for declarer, declaration in held:
            out += self.declare(declarer, declaration)
        return out

    def _give_up(self, names: Sequence[str], error: BpsError) -> m.Outgoing:
        self._declarations.give_up(names, error)
        return _declare_failed(FailedNames(tuple(names), error, ()), self._roster.alive_senders)


def _declare_failed(failed: FailedNames, senders: Sequence[bytes]) -> m.Outgoing:
    message = m.DeclareFailed(names=failed.names, error=type(failed.error).__name__, reason=str(failed.error))
    return [(sender, message) for sender in senders]
