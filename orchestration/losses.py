"""Who of a job is lost, who is only called so, and the recovery under way. Pure; `Job` tells it what happens.

A node that only sums can be done without: it is left out of the roster, and a `Recovery` begins. A node with ranks
cannot; but a helper that calls one lost may be wrong, for it may have been cut off itself: that one is doubted until it
is heard, and then the helper is done without, or until it is gone.
"""
from __future__ import annotations

from collections.abc import Sequence

from . import messages as m
from .errors import BpsError, PeerLostError, StallError
from .generations import Generations
from .recovery import Recovery
from .roster import Roster

Outgoing = list[tuple[bytes, m.Message]]

#: The first epoch; each recovery begins the next.
FIRST_EPOCH = 1

#: A node that is heard again so long after a helper has called it lost lives: it may have said before what comes first.
_ALIVE_S = 0.1


class Losses:
    """The losses of one job. Parameters are the `Job`'s own, which go on changing; *timeout_s*: for each recovery."""

    def __init__(self, roster: Roster, generations: Generations, timeout_s: float) -> None:
        self._roster = roster
        self._generations = generations
        self._timeout_s = timeout_s
        self._epoch = FIRST_EPOCH
        self._withdrawn: Sequence[m.TensorSpec] = ()  # in flight when a recovery began
        #: By a node with ranks, and a helper that has called it lost: when, and why.
        self._doubts: dict[bytes, dict[bytes, tuple[float, PeerLostError]]] = {}
        #: The recovery under way.
        self.recovery: Recovery | None = None

    # -- who is lost --------------------------------------------------------------------------------------

    def is_worker(self, sender: bytes) -> bool:
        """Whether ranks belong to the node behind *sender*, so that the job cannot go on without it."""
        return bool(self._roster.nodes[self._roster.index_of(sender)].ranks)

    def doubt(self, now: float, lost: bytes, helper: bytes, error: PeerLostError) -> None:
        """Note that *helper* calls *lost*, a node with ranks, lost for *error*."""
        self._doubts.setdefault(lost, {}).setdefault(helper, (now, error))

    def settle(self, now: float, sender: bytes) -> list[tuple[bytes, PeerLostError]]:
        """Return the helpers that have called *sender* lost, which is heard, and why: they do not reach each other."""
        doubts = self._doubts.get(sender, {})
        due = [helper for helper, (since, _) in doubts.items() if now - since >= _ALIVE_S]
        return [(helper, doubts.pop(helper)[1]) for helper in due]

    def lose(self, now: float, sender: bytes, error: PeerLostError) -> Outgoing:
        """Do without the helper behind *sender*: begin a recovery, or begin anew the one under way."""
        index, before = self._roster.index_of(sender), self.recovery
        self._roster.lost.add(index)
        self._withdrawn = self._generations.lose(index) or self._withdrawn
        self._epoch += 1
        lost, reason = {index}, str(error)
        if before is not None:
            lost, reason = {index, *before.lost}, f"{before.reason}; {error}"
        self.recovery = Recovery(self._epoch, lost, self._roster.alive, reason, now + self._timeout_s)
        abort = m.Abort(error="PeerLostError", goes_on=True, reason=f"the job goes on without this node: {error}")
        return [(sender, abort), *self._to_all(m.Freeze(epoch=self._epoch, lost=tuple(sorted(lost)), reason=reason))]

    # -- the recovery under way ---------------------------------------------------------------------------

    def frozen(self, node: int, message: m.Frozen) -> Outgoing:
        """Take the word of *node* that it has stopped; after the last one, tell everybody what changes hands.

        Raises
        ------
        BpsError
            If nobody can go on with what was lost, or nodes contradict each other.
        """
        recovery = self.recovery
        if recovery is None or not recovery.frozen(node, message):
            return []
        try:
            heirs = recovery.heirs(self._generations.units, self._roster.nodes, self._generations.lent)
        except BpsError as exc:
            raise type(exc)(f"{recovery.reason}; and the job cannot go on without it: {exc}") from exc
        units, successions = self._generations.succeed(heirs)
        recovery.generation, recovery.units, recovery.successions = self._generations.number, units, successions
        return self._to_all(m.Recover(epoch=recovery.epoch, generation=recovery.generation, units=tuple(units),
                                      successions=tuple(successions)))

    def ready(self, node: int, generation: int) -> Outgoing:
        """Take the word of *node* that it is prepared; after the last one, end the recovery with its commit."""
        recovery = self.recovery
        if recovery is None or not recovery.ready(node, generation):
            return []
        self.recovery = None
        return self._to_all(self._generations.succeeded(recovery.units, recovery.successions))

    def overdue(self, now: float) -> StallError | None:
        """Return what ends the job if the recovery has not ended in time."""
        if self.recovery is None or now < self.recovery.deadline:
            return None
        names = "; ".join(map(self._roster.describe_node, self.recovery.missing))
        return StallError(f"{names} did not answer within start_timeout_s = {self._timeout_s:g} s, when the job was to "
                          f"go on without what it has lost: {self.recovery.reason}")

    def take_withdrawn(self) -> Sequence[m.TensorSpec]:
        """Return, once, what was in flight when a recovery began: it is to be proposed anew."""
        withdrawn, self._withdrawn = self._withdrawn, ()
        return withdrawn

    def _to_all(self, message: m.Message) -> Outgoing:
        return [(sender, message) for sender in self._roster.alive_senders]
