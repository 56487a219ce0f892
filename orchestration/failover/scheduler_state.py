"""Decides for one scheduler: runs a new job, or takes over one that another scheduler began. Pure.

    first a Join       a new `Job`
    first a Rejoin     its scheduler was lost: `JobRebuild`, then a `Job` that continues where that one stopped
    later a Rejoin     a node was cut off, or this scheduler was stopped, and either may have missed messages: all nodes
                       are asked to rejoin, and the job is rebuilt as if this scheduler had lost its memory
    both               nodes with ranks join that no `Rejoin` knows: another job gathers, and the nodes of the earlier
                       one are refused, unless a majority of them lives
    no majority        of the nodes is heard any more: the same, so nothing is decided until it is

So there is one way to recover, the same for all causes.
"""
from __future__ import annotations

import math

from .. import messages as m
from ..errors import BpsError, PeerLostError, ProtocolError, StallError
from ..job.admission import JobSettings, find_node
from ..job.job import Job
from ..long_lists import LongLists
from .job_rebuild import JobRebuild, no_majority

#: Share of `start_timeout_s` after which a scheduler that hears no majority leaves the job to the next one, which its
#: launcher starts then: the nodes look for it for the rest of that time.
_SHORT = 0.5


class SchedulerState:
    """Decides for one scheduler; methods are as those of `Job`. Owner thread only; *now* is a monotonic clock."""

    def __init__(self, settings: JobSettings, now: float) -> None:
        self.job = Job(settings, now)
        #: Whether it ends without a word to the nodes, so that another scheduler goes on with them.
        self.has_given_up = False
        self._settings = settings
        self._short_s = settings.start_timeout_s * (
            _SHORT if settings.is_replaced else 1.0 if settings.has_others else math.inf)
        #: Since when the nodes of a job that come and go here are no majority; None: none have come, or they were one.
        self._short_since: float | None = None
        self._last_tick = now
        self._rebuilding: JobRebuild | None = None
        self._n_recalls = 0
        self._latest: dict[bytes, bytes] = {}  # the last connection by process
        self._lists = LongLists()

    @property
    def over(self) -> bool:
        """Whether nothing more will be decided."""
        return self.job.over

    def receive(self, now: float, sender: bytes, message: m.Message) -> m.Outgoing:
        """Decide what *message* from *sender* leads to.

        A node may reconnect before it was answered, and connections are read in any order: messages of an earlier
        connection that are read after the first one of a later connection are ignored. The node repeats them over the
        later one.
        """
        if self.has_given_up:
            return []
        process, number = m.dialled_as(sender)
        before = self._latest.get(process, sender)
        if number < m.dialled_as(before)[1]:
            return []
        self._latest[process] = sender
        out = self._lists.forget(now, before) if before != sender else []
        if not self._knows(sender):
            return out + self._receive(now, sender, message)
        self._note_heard(now, sender)
        try:
            ready, questions = self._lists.receive(now, sender, message)
        except ProtocolError as exc:
            return out + self.unreadable(now, sender, exc)
        out += questions
        for each, whole in ready:
            out += self._receive(now, each, whole)
        return out

    def _knows(self, sender: bytes) -> bool:
        """Whether *sender* takes part, or reports: messages of others wait for nothing."""
        rebuilding = self._rebuilding
        return self.job.knows(sender) or (rebuilding is not None and rebuilding.knows(sender))

    def _note_heard(self, now: float, sender: bytes) -> None:
        """Note that *sender* lives, though what it says may have to wait."""
        if self._rebuilding is not None:
            self._rebuilding.note_heard(now, sender)
        else:
            self.job.note_heard(now, sender)

    def _receive(self, now: float, sender: bytes, message: m.Message) -> m.Outgoing:
        if self._rebuilding is not None and not self.over:
            return self._rebuilding.receive(now, sender, message) + self._rebuilt(now)
        if isinstance(message, m.Rejoin):
            return self._rejoin(now, sender, message)
        if isinstance(message, m.Join) and message.ranks:
            self._short_since = None  # another job gathers
        if isinstance(message, m.Join) and self._is_cut_off(sender, message):
            return self._begin(now) + self._receive(now, sender, message)
        return self.job.receive(now, sender, message)

    def unreadable(self, now: float, sender: bytes, error: BpsError, has_ranks: bool = False) -> m.Outgoing:
        """Decide what follows from a message of *sender* that cannot be read; as `Job.unreadable`."""
        if self._rebuilding is not None and not self.over:
            return self._rebuilding.unreadable(sender, error) + self._rebuilt(now)
        return self.job.unreadable(now, sender, error, has_ranks)

    def take_remarks(self) -> list[str]:
        """Return, once, what is to be logged as warnings."""
        remarks, self.job.remarks = self.job.remarks, []
        return remarks

    def unreachable(self, now: float, sender: bytes) -> m.Outgoing:
        """Decide what follows from the end of *sender*'s connection."""
        if self.over:
            return []
        out = self._lists.forget(now, sender)
        if self._rebuilding is not None:
            self._rebuilding.unreachable(sender)
            is_over = not self._rebuilding.reporting and not self.job.admitted
            return out + self._gather(now, None) if is_over else out
        return out + self.job.closed(now, sender)

    def tick(self, now: float) -> m.Outgoing:
        """Decide what follows from the time. Call it several times a heartbeat."""
        slept_s, self._last_tick = now - self._last_tick, now
        if self.over:
            return []
        if self._short_since is not None and slept_s > self._settings.lease_s / 2:  # this process was stopped
            self._short_since += slept_s
        out = [each for sender in self._lists.senders if not self._knows(sender)
               for each in self._lists.forget(now, sender)]
        out += self._lists.tick(now)
        if self._rebuilding is not None:
            return out + self._rebuilding.tick(now) + self._rebuilt(now)
        if self._short_since is not None and now - self._short_since >= self._short_s:
            return self._give_up(StallError(no_majority(self._short_s)))
        out += self.job.tick(now)
        return out + self._begin(now) if self.job.has_no_majority else out

    def quiet(self, now: float) -> list[bytes]:
        """Return the nodes of which `pulse` must be called before the next `tick`."""
        return self.job.quiet(now) if self._rebuilding is None else []

    def pulse(self, sender: bytes, at: float | None) -> None:
        """Note when the last byte of *sender*'s connection came; None: not known."""
        self.job.pulse(sender, at)

    def leave(self, error: BpsError) -> bool:
        """Leave the job to the next scheduler, because of *error*, without a word to the nodes. Return False if none
        would take over: its nodes still gather, or it ends with any loss of a rank, as of those on this host.
        """
        is_running = self.job.admitted or self._rebuilding is not None
        if self.over or not (self._settings.is_replaced and self._settings.min_workers and is_running):
            return False
        assert not self._give_up(error), "is replaced"
        return True

    def abort(self, error: BpsError, *, but: tuple[bytes, ...] | list[bytes] = ()) -> m.Outgoing:
        """End the job with *error* on all nodes except *but*."""
        if self._rebuilding is None or self.over:
            return self.job.abort(error, but=but)
        self.job.abort(error)
        assert self.job.aborted is not None
        return [(sender, self.job.aborted) for sender in self._rebuilding.senders if sender not in but]

    # -- rebuilding ---------------------------------------------------------------------------------------

    def _rejoin(self, now: float, sender: bytes, rejoin: m.Rejoin) -> m.Outgoing:
        if self.job.aborted is not None:
            return [(sender, self.job.aborted)]
        if self.job.finished:
            return self.job.finish_again(sender, rejoin.index)
        if self.job.admitted and rejoin.job != self.job.name:
            return [(sender, m.refusal(PeerLostError(
                "the scheduler of this node's job is gone: at its address is that of another job")))]
        strangers = [join for join in self.job.joins.values() if join.ranks and find_node(join, rejoin.nodes) is None]
        if strangers:
            return [(sender, m.refusal(_other_job(strangers[0])))]
        if rejoin.version != m.VERSION:
            return [(sender, m.refusal(m.version_mismatch(rejoin.version, "a node")))]
        if rejoin.index in self.job.roster.lost and not self._may_be_old(rejoin):
            return [(sender, _left_behind())]
        if sender in self.job.heard:
            return []  # the answer to a recall that is over
        out = self._begin(now)
        return out + self._receive(now, sender, rejoin)

    def _may_be_old(self, rejoin: m.Rejoin) -> bool:
        """Whether the job may go on elsewhere with a node with ranks that is lost here: it is not refused then."""
        return (self._settings.has_others and bool(self.job.roster.nodes[rejoin.index].ranks)
                and self.job.is_loss_open(rejoin.settled_epoch))

    def _is_cut_off(self, sender: bytes, join: m.Join) -> bool:
        """Whether a node of the job has reconnected before it has read its `Welcome`."""
        if self.over or not self.job.admitted or sender in self.job.heard:
            return False
        node = find_node(join, self.job.roster.nodes)
        return node is not None and node.index not in self.job.roster.absent

    def _begin(self, now: float) -> m.Outgoing:
        """Ask all nodes to rejoin."""
        settings, joins, known = self._settings, self.job.joins, self.job.heard
        n_known = 1 + max((index for index, _ in known.values()), default=-1)  # newcomers are not waited for
        self._n_recalls += 1
        self._rebuilding = JobRebuild(
            settings.package, heartbeat_s=settings.heartbeat_s, lease_s=settings.lease_s,
            timeout_s=settings.start_timeout_s, now=now, recall=self._n_recalls, known=known,
            nodes=self.job.roster.nodes[:n_known], job=self.job.name if self.job.admitted else "",
            fingerprint=settings.fingerprint, min_workers=settings.min_workers,
            # Others may have taken over since, and gone on with nodes that this one has dropped.
            lost=() if settings.has_others else [index for index in self.job.roster.lost if index < n_known],
            short_s=self._short_s, short_since=self._short_since)
        for sender, join in joins.items():
            self._rebuilding.receive(now, sender, join)
        return [*((sender, _left_behind()) for sender in self.job.coming),
                *((sender, m.RejoinRequest(number=self._n_recalls)) for sender in known)]

    def _rebuilt(self, now: float) -> m.Outgoing:
        """Continue with the job if it is rebuilt, or has ended meanwhile."""
        rebuilding = self._rebuilding
        assert rebuilding is not None
        if not rebuilding.is_due:
            return []
        rebuilding.is_due = False
        another = None if self.job.admitted else rebuilding.another
        if rebuilding.finished:
            if another is not None:
                return self._gather(now, m.Finish())
            return self.job.finish(rebuilding.senders)
        try:
            if rebuilding.aborted is not None:
                raise rebuilding.aborted
            snapshot = rebuilding.snapshot(now)
        except BpsError as exc:
            if another is not None:
                return self._gather(now, m.refusal(exc))
            if self._settings.has_others and isinstance(exc, StallError) and not rebuilding.is_alive:
                return self._give_up(exc)
            return self.abort(exc)
        if snapshot is None:
            if another is None or rebuilding.is_alive:
                return []
            return self._gather(now, m.refusal(_other_job(another)))
        self._rebuilding = self._short_since = None
        self._lists.forget_lists(m.CommittedUnits)
        newcomers = rebuilding.newcomers
        known = {*snapshot.roster.senders, *(sender for sender, _ in newcomers)}
        out: m.Outgoing = [(sender, _left_behind()) for sender in rebuilding.senders if sender not in known]
        self.job = Job(self._settings, now)
        out += self.job.resume(now, snapshot)
        for sender, join in newcomers:
            out += self.job.receive(now, sender, join)
        return out

    def _give_up(self, error: BpsError) -> m.Outgoing:
        """Leave the job to another scheduler because of *error*: no node is told, unless this one is the last."""
        told = self.abort(error)
        self.has_given_up = not self._settings.is_last
        return [] if self.has_given_up else told

    def _gather(self, now: float, last_word: m.Message | None) -> m.Outgoing:
        """Gather a new job of the nodes that have joined; send *last_word* to those of the earlier one."""
        rebuilding, self._rebuilding = self._rebuilding, None
        assert rebuilding is not None
        # Nodes that look for a majority come, and leave soon: all that time there was none.
        is_another = rebuilding.another is not None
        self._short_since = None if is_another or rebuilding.is_alive else rebuilding.short_since
        self.job = Job(self._settings, now)
        out: m.Outgoing = [(sender, last_word) for sender in rebuilding.reporting] if last_word is not None else []
        for sender, join in rebuilding.newcomers:
            out += self.job.receive(now, sender, join)
        return out


def _other_job(join: m.Join) -> PeerLostError:
    return PeerLostError(f"the scheduler of this node's job is gone: at its address another job gathers, of which the "
                         f"node on host {join.host} (pid {join.pid}, {len(join.ranks)} ranks) has come")


def _left_behind() -> m.Abort:
    return m.dropped("the job goes on without this node, which it has lost, or had not taken in when the scheduler was")
