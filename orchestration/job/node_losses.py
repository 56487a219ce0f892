"""Records lost and suspected nodes, and runs the change to another set of nodes (an epoch). Pure; `Job` calls it.

A node without ranks can be dropped: it is left out of the roster, and an `EpochChange` begins. The same happens for
nodes that come late, which then get their share of the sums. A rank, or a node with ranks, can be dropped only in a job
that goes on without lost ranks (the setting on_worker_loss). A helper that calls
one lost may be wrong, because it may be cut off itself: the node is suspected until it is heard, and then the helper is
dropped, or until it is gone.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .. import messages as m
from ..errors import BpsError, PeerLostError, StallError
from ..roster import Roster, may_decide
from .generations import Generations
from .recovery import EpochChange, JobSnapshot

#: The first epoch; each recovery begins the next.
FIRST_EPOCH = 1

#: So much later it is decided which of two nodes with ranks is lost, of which one has called the other lost: by then
#: others may have called one of the two lost, and the connection of one whose process has ended is closed.
_JUDGED_S = 0.5
#: A node that is heard this long after a helper has called it lost lives: earlier messages may be older than the loss.
_ALIVE_S = 0.1


class NodeLosses:
    """The losses of one job. Parameters are the `Job`'s own objects, which change; *timeout_s*: for each recovery."""

    def __init__(self, roster: Roster, generations: Generations, timeout_s: float) -> None:
        self._roster = roster
        self._generations = generations
        self._timeout_s = timeout_s
        self._epoch = FIRST_EPOCH
        #: The last epoch that was committed: what connections of nodes that come late begin with.
        self.committed_epoch = FIRST_EPOCH
        self._withdrawn: Sequence[m.TensorSpec] = ()  # in flight when a change began
        #: By a node with ranks, and a helper that has called it lost: when, and why.
        self._suspected: dict[bytes, dict[bytes, tuple[float, PeerLostError]]] = {}
        self._committed_ranks: frozenset[int] = frozenset()  # lost ranks, without which the last epoch was committed
        #: Nodes with ranks, of which the second has called the first lost: when, and why.
        self._accused: dict[tuple[bytes, bytes], tuple[float, PeerLostError]] = {}
        self._without_share: set[int] = set()  # newcomers that take part, but have not got their share
        #: As in `may_decide`: losses that are not committed make a majority no smaller.
        self._voters: Collection[int] = frozenset(roster.workers)
        #: The last epoch that was committed for certain; after a loss of the scheduler it may be an earlier one.
        self.settled_epoch = FIRST_EPOCH
        self._dead: set[int] = set()
        #: The change under way.
        self.recovery: EpochChange | None = None

    # -- losses and suspicions ----------------------------------------------------------------------------

    def is_worker(self, sender: bytes) -> bool:
        """Whether the node behind *sender* has ranks, so that the job cannot go on without it."""
        return bool(self._roster.nodes[self._roster.index_of(sender)].ranks)

    def suspect(self, now: float, lost: bytes, helper: bytes, error: PeerLostError) -> None:
        """Note that *helper* calls *lost*, a node with ranks, lost because of *error*."""
        self._suspected.setdefault(lost, {}).setdefault(helper, (now, error))

    def accuse(self, now: float, accused: bytes, accuser: bytes, error: PeerLostError) -> None:
        """Note that *accuser* calls *accused* lost, both nodes with ranks, because of *error*."""
        self._accused.setdefault((accused, accuser), (now, error))

    def accusation(self, sender: bytes) -> PeerLostError | None:
        """Return why another node with ranks calls *sender* lost, if one does."""
        return next((error for (accused, _), (_, error) in self._accused.items() if accused == sender), None)

    def judged(self, now: float, silent_s: Callable[[bytes], float],
               is_closed: Callable[[bytes], bool] = lambda sender: False) -> list[tuple[bytes, PeerLostError]]:
        """Return the node that is dropped because of what nodes with ranks say of each other, if it is time, and why.

        They do not reach each other, and one has to go: that whose connection *is_closed* here, or which most others do
        not reach, or which has been silent for longer here (*silent_s*), or the later one.
        """
        if not any(now - since >= _JUDGED_S for since, _ in self._accused.values()):
            return []
        partners: dict[bytes, set[bytes]] = {}
        for accused, accuser in self._accused:
            partners.setdefault(accused, set()).add(accuser)
            partners.setdefault(accuser, set()).add(accused)
        longest_s = max(map(silent_s, partners))
        chosen = max(partners, key=lambda sender: (
            is_closed(sender), len(partners[sender]), longest_s > _ALIVE_S and silent_s(sender) > longest_s / 2,
            self._roster.index_of(sender)))
        error = self.accusation(chosen) or PeerLostError(
            f"{self._roster.describe_node(self._roster.index_of(chosen))} calls others lost that reach each other")
        return [(chosen, error)]

    def disproved(self, now: float, sender: bytes) -> list[tuple[bytes, PeerLostError]]:
        """Return the helpers that have called *sender* lost, which is heard, and why: they cannot reach each other."""
        suspected = self._suspected.get(sender, {})
        due = [helper for helper, (since, _) in suspected.items() if now - since >= _ALIVE_S]
        return [(helper, suspected.pop(helper)[1]) for helper in due]

    def lose(self, now: float, sender: bytes, error: PeerLostError) -> m.Outgoing:
        """Drop the node behind *sender*: begin a recovery, or begin anew the one in progress."""
        index = self._roster.index_of(sender)
        self._roster.lost.add(index)
        self._roster.lost_ranks.update(self._roster.nodes[index].ranks)
        self._suspected.pop(sender, None)
        self._accused = {pair: said for pair, said in self._accused.items() if sender not in pair}
        self._without_share.discard(index)
        self._withdrawn = self._generations.lose(index) or self._withdrawn
        abort = m.dropped(f"the job goes on without this node: {error}")
        return [(sender, abort), *self._begin_without({index}, now, error)]

    def lose_rank(self, now: float, rank: int, error: PeerLostError) -> m.Outgoing:
        """Go on without *rank*, whose node lives and has other ranks, in the same way."""
        self._roster.lost_ranks.add(rank)
        self._withdrawn = self._generations.withdraw() or self._withdrawn
        return self._begin_without(set(), now, error)

    def _begin_without(self, lost: set[int], now: float, error: PeerLostError) -> m.Outgoing:
        before, reason = self.recovery, str(error)
        if before is not None and (before.lost or before.fresh_ranks):
            lost, reason = {*lost, *before.lost}, f"{before.reason}; {error}"
        return self._begin(now, reason, lost)

    def has_majority(self, but: Sequence[bytes]) -> bool:
        """Whether the nodes with ranks except those behind *but* are enough to decide anything."""
        return may_decide([index for index in self._roster.workers if self._roster.senders[index] not in but],
                          self._voters, self._dead)

    def note_dead(self, sender: bytes) -> None:
        """Note that the process of the node behind *sender* has ended, or that it has said so itself."""
        self._dead.add(self._roster.index_of(sender))

    def resume(self, now: float, snapshot: JobSnapshot) -> m.Outgoing:
        """Continue after another scheduler: with a recovery, if one was in progress or a node is lost by now."""
        self._epoch = self.committed_epoch = snapshot.epoch  # if not committed, a next one precedes any newcomer
        self._voters, self._dead = snapshot.voters, set(snapshot.dead)
        self.settled_epoch = snapshot.settled_epoch
        self._committed_ranks = frozenset() if snapshot.frozen or snapshot.absent else frozenset(snapshot.lost_ranks)
        if not snapshot.absent and not snapshot.frozen:
            return []
        names = ", ".join(map(self._roster.describe_node, sorted(self._roster.lost)))
        return self._begin(now, f"{names or 'nobody'} was lost beside the scheduler, or when that was lost",
                           self._roster.lost)

    # -- newcomers ----------------------------------------------------------------------------------------

    def integrate(self, now: float, newcomers: Collection[int]) -> m.Outgoing:
        """Let *newcomers* take part, and give them their share, and also those that a loss has kept from it."""
        self._roster.joining.difference_update(newcomers)
        self._without_share.update(newcomers)
        if not self._without_share:
            return []
        self._withdrawn = self._generations.withdraw() or self._withdrawn
        names = "; ".join(map(self._roster.describe_node, sorted(self._without_share)))
        return self._begin(now, f"{names} has come" if len(self._without_share) == 1 else f"{names} have come",
                           joined=self._without_share)

    def restart_without_share(self, now: float, why: str) -> m.Outgoing:
        """Begin anew the change in progress, without giving newcomers a share, because of *why*."""
        assert self.recovery is not None and self.recovery.joined
        self._without_share.clear()
        return self._begin(now, f"{self.recovery.reason}, but gets nothing that others sum: {why}")

    def limit_share(self, node: int, room_nbytes: int) -> bool:
        """Note that *node* has no memory for the partitions of lost nodes, except for about *room_nbytes*.

        Returns False if it was to own none.
        """
        assert self.recovery is not None
        changed = {each.part for each in self.recovery.owner_changes}
        given = sum(part.wire_nbytes for unit in self.recovery.units for part in unit.parts
                    if part.part in changed and part.owner == node)
        if given:
            self._generations.limit(node, room_nbytes, given)
        return given > 0

    def restart(self, now: float) -> m.Outgoing:
        """Begin anew the change in progress, which a node cannot prepare."""
        assert self.recovery is not None
        return self._begin(now, self.recovery.reason, self.recovery.lost)

    def overdue_newcomers(self, now: float) -> list[tuple[bytes, StallError]]:
        """Return the newcomers that keep all others waiting for too long, and are dropped."""
        recovery = self.recovery
        if recovery is None or now < recovery.deadline:
            return []
        return [(self._roster.senders[index], StallError(
            f"{self._roster.describe_node(index)} did not answer within start_timeout_s = {self._timeout_s:g} s, when "
            "it was to get its share of the sums")) for index in recovery.missing if index in self._without_share]

    # -- the change of epoch in progress ------------------------------------------------------------------

    def frozen(self, node: int, message: m.FreezeReport) -> m.Outgoing:
        """Note that *node* has stopped; after the last one, tell all nodes which partitions change owners.

        Raises `BpsError` if the job cannot go on without what was lost, or nodes contradict each other.
        """
        recovery = self.recovery
        if recovery is None or not recovery.frozen(node, message):
            return []
        try:
            if recovery.joined:
                units, changes = self._generations.share(
                    recovery.moves_to_joined(self._generations.units, self._roster.nodes, self._generations.changes))
            else:
                recovery.leave_ranks(self._generations.units, self._roster.nodes, self._generations.changes)
                units, changes = self._generations.replace_lost(
                    recovery.moves_of_lost(self._generations.units, self._roster.nodes, self._generations.changes))
        except BpsError as exc:
            then = "" if recovery.joined else "and the job cannot go on without it: "
            raise type(exc)(f"{recovery.reason}; {then}{exc}") from exc
        concerned = {each.part for each in recovery.keepers}
        known = {unit.unit for unit in units}
        units = [*units, *(unit for unit in self._generations.units if concerned and unit.unit not in known
                           and not concerned.isdisjoint(part.part for part in unit.parts))]
        recovery.generation, recovery.units, recovery.owner_changes = self._generations.number, units, changes
        return self._roster.to_all(m.Recover(
            epoch=recovery.epoch, generation=recovery.generation, units=tuple(units), owner_changes=tuple(changes),
            redone=tuple(recovery.redone), keepers=tuple(recovery.keepers), begins=tuple(recovery.begins)))

    def ready(self, node: int, generation: int) -> m.Outgoing:
        """Note that *node* is prepared; after the last one, end the change with its commit."""
        recovery = self.recovery
        if recovery is None or not recovery.ready(node, generation):
            return []
        self.recovery, self.committed_epoch, self._committed_ranks = None, recovery.epoch, recovery.lost_ranks
        self._without_share -= recovery.joined
        self.settled_epoch = recovery.epoch
        self._voters = frozenset(self._roster.workers)
        return self._roster.to_all(self._generations.owners_changed(recovery.units, recovery.owner_changes,
                                                                    recovery.redone, recovery.keepers))

    def overdue(self, now: float) -> StallError | None:
        """Return the error that ends the job if the change has not ended in time."""
        if self.recovery is None or now < self.recovery.deadline:
            return None
        names = "; ".join(map(self._roster.describe_node, self.recovery.missing))
        what = "with others summing" if self.recovery.joined else "without what it has lost"
        return StallError(f"{names} did not answer within start_timeout_s = {self._timeout_s:g} s, when the job was to "
                          f"go on {what}: {self.recovery.reason}")

    def take_withdrawn(self) -> Sequence[m.TensorSpec]:
        """Return, once, what was in progress when a change began, to be proposed anew."""
        withdrawn, self._withdrawn = self._withdrawn, ()
        return withdrawn

    def _begin(self, now: float, reason: str, lost: Collection[int] = (), joined: Collection[int] = ()) -> m.Outgoing:
        self._epoch += 1
        lost_ranks = frozenset(self._roster.lost_ranks)
        fresh_ranks = frozenset() if joined else lost_ranks - self._committed_ranks
        self.recovery = EpochChange(self._epoch, lost, self._roster.alive, reason, now + self._timeout_s, joined,
                                    lost_ranks, fresh_ranks)
        return self._roster.to_all(m.Freeze(epoch=self._epoch, lost=tuple(sorted(lost)), joined=tuple(sorted(joined)),
                                            reason=reason, lost_ranks=tuple(sorted(lost_ranks)),
                                            reports_all=bool(joined or fresh_ranks)))
