"""Decides for one job what the scheduler answers. Pure: messages and the time go in, messages come out.

    joins -> Admission -> Welcome
    declarations -> GenerationPlanner: Plan -> Ready from all -> Commit
    barriers, "who is missing?", "who is late?", stored values -> RankQueries
    a helper or rank is lost -> NodeLosses: Freeze -> FreezeReport from all that are left -> Recover -> Ready -> Commit
    a helper comes late -> LateJoins: Joined -> NewcomerReady -> Welcome -> NewcomerReady, then the same change of epoch
    silence, or another node is lost -> Abort,  all ranks left -> Finish
    the scheduler before was lost -> `SchedulerState`

Every message goes to nodes; a node passes on what concerns its ranks. Whatever happens, all nodes get the same Welcome,
Plans and Commits in the same order, or the same Abort.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .. import messages as m
from ..errors import BpsError, ConfigError, PeerLostError, ProtocolError, StallError
from ..placement_policy import check_policy
from ..roster import Roster, number_of
from .admission import Admission, JobSettings as JobSettings, NicRates
from .declarations import Declarations
from .generations import Generations
from .late_joins import LateJoins
from .liveness import DEAD_S, GOES_ON_DEAD_S, HeartbeatMonitor, NodeProbes
from .node_losses import FIRST_EPOCH, NodeLosses
from .planning import GenerationPlanner
from .rank_queries import Barriers, RankQueries
from .recovery import JobSnapshot

#: Messages that wait while a recovery is in progress, because they change what is committed.
_DEFERRED = (m.Declare, m.Retire)
#: Share of `start_timeout_s` after which a job starts without the helpers that have not come. The rest of it is left
#: for connecting; the helpers may come late.
_HELPERS_WAIT = 0.5
#: Interval of looks at who is silent, as a share of `heartbeat_s`: thousands may be looked at.
_PROBE_SHARE = 0.1


class Job:
    """One job from the first join to the end. Owner thread only; *now* is any monotonic clock, in seconds."""

    def __init__(self, settings: JobSettings, now: float) -> None:
        if settings.num_nodes < 1 and not (settings.num_nodes == -1 and settings.size > 0):
            raise ConfigError(f"num_nodes must be at least 1, got {settings.num_nodes}; -1 (not known) needs the size")
        check_policy(settings.placement)
        self.settings = settings
        self.finished = False
        self.aborted: m.Abort | None = None
        self.has_no_majority = False  # too few nodes with ranks are heard to decide anything
        self.name = settings.name
        #: Texts that the scheduler logs as warnings.
        self.remarks: list[str] = []
        self._admission = Admission(settings)
        self._waits_since = None if settings.awaits_ranks else now  # when the job began to wait for all nodes
        self._next_heartbeat = now + settings.heartbeat_s
        self._n_heartbeats = 0
        self._next_probe = now
        self._heartbeats = HeartbeatMonitor(settings.lease_s, settings.helper_lease_s, now)
        self._probes = NodeProbes(settings.lease_s, settings.start_timeout_s, now,
                                  GOES_ON_DEAD_S if settings.min_workers else DEAD_S)
        self._reached_by_others: set[bytes] = set()  # silent for too long, but known to live
        self._replaced_senders: set[bytes] = set()  # earlier connections of processes that have reconnected
        self._refused = ""  # why the last refused join was refused, while the job gathers
        self._left: set[int] = set()
        self._unacknowledged: set[bytes] = set()  # nodes that have not acknowledged the end
        self.roster = Roster(())  # empty until all nodes have joined
        self.admitted = False  # whether all nodes have joined
        self._deferred: list[tuple[bytes, m.Message]] = []
        self._credit: m.CreditChanged | None = None
        self._declarations: Declarations
        self._generations: Generations
        self._planning: GenerationPlanner
        self._measuring: NicRates
        self._losses: NodeLosses
        self._late_joins: LateJoins
        self._barriers: Barriers
        self._queries: RankQueries
        self._handlers: dict[type, Callable[..., m.Outgoing]] = {
            m.Measured: self._measured, m.Ready: self._ready, m.MemoryFreed: self._room,
            m.NewcomerReady: self._newcomer_ready,
            m.Declare: lambda now, sender, message: self._planning.declare(sender, message),
            m.PrepareFailed: lambda now, sender, message: self._planning.prepare_failed(now, sender, message),
            m.Retire: lambda now, sender, message: self._planning.retire(message),
            m.FreezeReport: lambda now, sender, message: self._losses.frozen(self.roster.index_of(sender), message),
            m.RankLeft: self._rank_left,
            m.BarrierEnter: lambda now, sender, message: self._to_all(m.BarrierDone(sequence=message.sequence))
            if self._barriers.enter(message.rank, message.sequence) else [],
            m.Credit: self._set_credit, m.ProbeResult: self._probed,
            # Of a report that this scheduler has not asked for, or asks for no more.
            m.CommittedUnits: lambda now, sender, message: [], m.RejoinComplete: lambda now, sender, message: [],
        }

    @property
    def over(self) -> bool:
        """Whether nothing more will be decided."""
        return self.finished or self.aborted is not None

    @property
    def is_known_to_be_over(self) -> bool:
        """Whether all nodes have read that the job has finished."""
        return not self._unacknowledged

    @property
    def joins(self) -> dict[bytes, m.Join]:
        """The joins so far, by sender, until all nodes have joined."""
        return {} if self.admitted else self._admission.joins

    @property
    def heard(self) -> dict[bytes, tuple[int, float]]:
        """Each node that takes part, and when it was heard, by sender."""
        alive = set(self.roster.alive_senders)
        return {sender: (self.roster.index_of(sender), seen) for sender, seen in self._heartbeats.seen.items()
                if sender in alive}

    @property
    def coming(self) -> list[bytes]:
        """The connections of late nodes that do not take part yet, last those for which there is no room."""
        if not self.admitted:
            return []
        return [*(self.roster.senders[index] for index in sorted(self.roster.joining)), *self._late_joins.queue]

    def knows(self, sender: bytes) -> bool:
        """Whether *sender* has joined."""
        return sender in self._heartbeats

    def note_heard(self, now: float, sender: bytes) -> None:
        """Note that *sender*, which has joined, lives."""
        if not self.over:
            self._heartbeats.heard(now, sender)

    def receive(self, now: float, sender: bytes, message: m.Message) -> m.Outgoing:
        """Decide what *message* from *sender* leads to; return (destination, message) in the order to be sent."""
        if sender in self._replaced_senders:
            return []
        if isinstance(message, m.FinishAck):
            self._unacknowledged.discard(sender)
            return []
        if isinstance(message, m.Join) and (self.over or sender not in self._heartbeats):
            return self._newcomer(now, sender, message)
        if self.over or sender not in self._heartbeats:
            return []
        self._heartbeats.heard(now, sender)
        settled = self._losses.disproved(now, sender) if self.admitted else ()  # helpers that have called it lost
        out = [each for helper, error in settled for each in self._lose(now, helper, error)]
        return out + self._handle(now, sender, message)

    def _handle(self, now: float, sender: bytes, message: m.Message) -> m.Outgoing:
        if isinstance(message, m.Heartbeat):
            return [(sender, m.Echo(sent_ns=message.sent_ns, there_ns=int(now * 1e9)))] if message.sent_ns else []
        if isinstance(message, m.Lost):
            return self._lost(now, sender, message)
        if isinstance(message, m.Join):
            return self._join(now, sender, message)
        if not self.admitted:
            return self._fail(now, sender, ProtocolError(
                f"{self._name(sender)} sent {type(message).__name__} before all had joined"))
        rank = getattr(message, "rank", None)
        if rank in self.roster.lost_ranks:
            return []
        if rank is not None and self.roster.node_of(rank) != self.roster.index_of(sender):
            return self._fail(now, sender, ProtocolError(
                f"{self._name(sender)} sent {type(message).__name__} for rank {rank}, which is not its own"))
        if self._losses.recovery is not None and isinstance(message, _DEFERRED):
            self._deferred.append((sender, message))
            return []
        try:
            return self._handlers[type(message)](now, sender, message)
        except BpsError as exc:
            return self.abort(exc)

    def unreadable(self, now: float, sender: bytes, error: BpsError, has_ranks: bool = False) -> m.Outgoing:
        """Decide what follows from a message of *sender* that cannot be read, because of *error*.

        A client that is no member is refused. While the job gathers, it would wait for a node with ranks that is
        refused (a `Join` that *has_ranks*), so the job is aborted at once.
        """
        if sender in self._replaced_senders:
            return []
        if not self.over and sender in self._heartbeats:
            return self._fail(now, sender, ProtocolError(f"a message of {self._name(sender)} cannot be read: {error}"))
        refuse: m.Outgoing = [(sender, m.refusal(error))]
        if self.over or self.admitted:
            return refuse
        self._refused = str(error)
        return refuse + self.abort(error, but=[sender]) if has_ranks else refuse

    def unreachable(self, now: float, sender: bytes) -> m.Outgoing:
        """Decide what follows from the end of *sender*'s connection."""
        if self.over or sender not in self._heartbeats:
            return []
        return self._lose(now, sender, PeerLostError(f"{self._name(sender)} closed its connection to the scheduler "
                                                     "without leaving: its process is gone"), is_dead=True)

    def closed(self, now: float, sender: bytes) -> m.Outgoing:
        """Decide what follows from the end of *sender*'s connection, which may come back as another one."""
        if self.over or (self.admitted and self._late_joins.leave_queue(sender)) or sender not in self._heartbeats:
            return []
        if self.admitted:
            self._probes.closed(now, self.roster.index_of(sender))
            accusation = self._losses.accusation(sender)
            return self._drop_if_dead(now, sender) if accusation is None else self._lose(now, sender, accusation)
        return self._lose(now, sender, PeerLostError(f"{self._name(sender)} closed its connection to the scheduler")
                          ) if self._is_dispensable(sender) else []  # it says again that it joins, if it lives

    def _drop_if_dead(self, now: float, sender: bytes) -> m.Outgoing:
        """Drop the node behind *sender* if its process is proven dead, or end the job."""
        if not self._probes.is_dead(now, self.roster.index_of(sender), has_ranks=not self._is_helper(sender)):
            return []
        return self.unreachable(now, sender)

    def _probed(self, now: float, sender: bytes, message: m.ProbeResult) -> m.Outgoing:
        """Take the result of a probe; see at once whether the probed node is still connected here."""
        if message.node >= len(self.roster.nodes) or message.node < 0:
            return self._fail(now, sender, ProtocolError(f"{self._name(sender)} has probed node {message.node}, of "
                                                          f"{len(self.roster.nodes)}"))
        probed = self.roster.senders[message.node]
        self._probes.probed(now, message)
        if message.outcome != "refused" or probed not in self._heartbeats:
            return []
        return self._drop_if_dead(now, probed) or [(probed, m.Heartbeat(sequence=self._n_heartbeats))]

    def tick(self, now: float) -> m.Outgoing:
        """Decide what follows from the time: heartbeats, deadlines, leases. Call it several times a heartbeat."""
        self._heartbeats.tick(now)
        self._probes.tick(now)
        if self.over:
            return []
        waited_s = 0.0 if self._waits_since is None else now - self._waits_since
        if (not self.admitted and waited_s >= _HELPERS_WAIT * self.settings.start_timeout_s
                and self._admission.has_all_ranks()):
            return self._welcome()
        if not self.admitted and waited_s >= self.settings.start_timeout_s:
            refused = f"; refused: {self._refused}" if self._refused else ""
            return self.abort(StallError(f"the job is not complete after start_timeout_s = "
                                         f"{self.settings.start_timeout_s:g} s: {self._admission.describe()}{refused}"))
        out: m.Outgoing = []
        silent = self._heartbeats.silent(now, self._is_helper)
        if self.admitted and not self._losses.has_majority(but=[sender for sender, _ in silent]):
            self.has_no_majority = True
            return []
        for sender, words in silent:
            if not self.over and not self._is_reached_by_others(now, sender, words):
                out += self._lose(now, sender, PeerLostError(f"{self._name(sender)} has been {words}"))
        if self.admitted and now >= self._next_probe:
            self._next_probe = now + self.settings.heartbeat_s * _PROBE_SHARE
            out += self._probe_silent(now)
        for sender, error in self._losses.judged(now, self._silent_s(now), self._is_closed) if self.admitted else ():
            out += self._lose(now, sender, error)
        if self.admitted:
            out += self._expire(now)
        if self.over:
            return out
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self.settings.heartbeat_s
            self._n_heartbeats += 1
            out += self._to_all(m.Heartbeat(sequence=self._n_heartbeats), True)
        if self.admitted:
            out += self._queries.expire(now)
        return out

    def _silent_s(self, now: float) -> Callable[[bytes], float]:
        """Return for how long each node has been silent."""
        return lambda sender: now - self._heartbeats.seen.get(sender, now)

    def _is_closed(self, sender: bytes) -> bool:
        """Whether the connection of the node behind *sender* has closed, without a new one."""
        return self._probes.is_closed(self.roster.index_of(sender))

    def _is_reached_by_others(self, now: float, sender: bytes, words: str) -> bool:
        """Whether other nodes reach the node behind *sender*, which has ranks and is silent here (*words*)."""
        if not self.admitted or self._is_helper(sender):
            return False
        if not self._probes.lives(now, self.roster.index_of(sender), self._heartbeats.seen[sender]):
            return False
        if sender not in self._reached_by_others:
            self._reached_by_others.add(sender)
            self.remarks.append(f"{self._name(sender)} has been {words}, but other nodes reach it: it has "
                                f"start_timeout_s = {self.settings.start_timeout_s:g} s to reach the scheduler again")
        return True

    def _probe_silent(self, now: float) -> m.Outgoing:
        """Probe the nodes with ranks that are not heard, or have closed their connection; drop those that are dead."""
        out: m.Outgoing = []
        for sender, seen in list(self._heartbeats.seen.items()):
            if self.over or not self.roster.knows(sender):
                continue
            out += self._drop_if_dead(now, sender)
            index = self.roster.index_of(sender)
            if self.over or sender not in self._heartbeats or (
                    self._is_helper(sender) and not self._probes.is_closed(index)):
                continue
            out += self._probes.ask(now, index, seen, lambda sender=sender: [
                (self.roster.index_of(other), other) for other in self.roster.alive_senders
                if other != sender and (self._losses.is_worker(other) or self._losses.is_worker(sender))
                and now - self._heartbeats.seen.get(other, 0.0) < self.settings.lease_s / 4])
        return out

    def quiet(self, now: float) -> list[bytes]:
        """Return the nodes of which `pulse` must be called before the next `tick`."""
        return [] if self.over else self._heartbeats.quiet(now, self._is_helper)

    def pulse(self, sender: bytes, at: float | None) -> None:
        """Note when the last byte of *sender*'s connection came; None: not known."""
        self._heartbeats.pulse(sender, at)

    def _is_helper(self, sender: bytes) -> bool:
        return self.admitted and self.roster.knows(sender) and not self._losses.is_worker(sender)

    def _is_dispensable(self, sender: bytes) -> bool:
        """Whether the job can go on, or gather, without the node behind *sender*, which then has no ranks."""
        if self.admitted:
            return not self._losses.is_worker(sender)
        join = self._admission.joins.get(sender)
        return join is not None and not join.ranks

    def _expire(self, now: float) -> m.Outgoing:
        out: m.Outgoing = []
        for sender, error in (*self._late_joins.overdue(now), *self._losses.overdue_newcomers(now)):
            out += self._lose(now, sender, PeerLostError(str(error)))
        out += self._admit_queued(now)
        overdue = self._losses.overdue(now)
        return out if overdue is None else out + self.abort(overdue)

    def abort(self, error: BpsError, *, but: Sequence[bytes] = ()) -> m.Outgoing:
        """End the job with *error* on all nodes except *but*."""
        if self.over:
            return []
        self.aborted = m.Abort(error=type(error).__name__, reason=str(error))
        return [each for each in self._to_all(self.aborted, True) if each[0] not in but]

    # -- joining ------------------------------------------------------------------------------------------

    def _newcomer(self, now: float, sender: bytes, join: m.Join) -> m.Outgoing:
        if self.aborted is not None:
            return [(sender, self.aborted)]
        refusal = self._late_joins.refusal(sender, join, self.finished) if self.admitted else None
        if refusal is not None:
            return [(sender, m.refusal(refusal))]
        if self.admitted and not self._late_joins.has_room:
            self._late_joins.wait(now, sender, join)
            return []
        self._heartbeats.heard(now, sender)
        if self.admitted:
            self._measuring.add(join.nic_rate_bytes)
            return self._late_joins.admit(now, sender, join)
        return self._join(now, sender, join)

    def _admit_queued(self, now: float) -> m.Outgoing:
        """Admit the nodes for which there is room now; refuse those that have waited long enough."""
        out: m.Outgoing = []
        while (found := self._late_joins.next_in_queue(now)) is not None:
            sender, join, refusal = found
            out += self._newcomer(now, sender, join) if refusal is None else [(sender, m.refusal(refusal))]
        return out

    def _newcomer_ready(self, now: float, sender: bytes, message: m.NewcomerReady) -> m.Outgoing:
        welcome = self._late_joins.newcomer_ready(sender, message, self.name, self._losses.committed_epoch,
                                                  self._measuring.rates, self._generations.units)
        tuned = [(newcomer, self._credit) for newcomer, _ in welcome if self._credit is not None]
        return welcome + tuned + self._integrate_newcomers(now)

    def _integrate_newcomers(self, now: float) -> m.Outgoing:
        """Let connected newcomers take part, and give a share to those that have none."""
        if self._losses.recovery is not None or self._measuring.waiting:
            return []
        out = self._losses.integrate(now, self._late_joins.take_linked())
        self._update_nodes()
        return out

    def _update_nodes(self) -> None:
        """Plan with the current nodes and the known rates of their NICs."""
        self._generations.update_nodes(self._measuring.known(self.roster.nodes), self.roster.absent)

    def _join(self, now: float, sender: bytes, join: m.Join) -> m.Outgoing:
        """Admit a new node or take a node's corrected counts; welcome all nodes when it was the last."""
        if self.admitted:
            if self._late_joins.is_coming(self.roster.index_of(sender)):
                return []  # other counts: of no matter for a job that runs
            return self._fail(now, sender, ProtocolError(f"{self._name(sender)} joined twice"))
        refusal = self._admission.check(join) or self._admission.surplus(join)
        if refusal is not None:
            return self._refuse_join(sender, join, refusal)
        if self._waits_since is None and join.ranks:
            self._waits_since = now
        before = self._admission.add(sender, join)
        if before is not None:
            self._heartbeats.forget(before)
            self._replaced_senders.add(before)
        contradiction = self._admission.contradiction()
        if contradiction is not None:
            return self._refuse_join(sender, join, contradiction)
        return self._welcome() if self._admission.complete() else []

    def _refuse_join(self, sender: bytes, join: m.Join, error: BpsError) -> m.Outgoing:
        """Refuse the node that has sent *join*. If the job cannot be complete without its ranks, it ends at once."""
        refuse = (sender, m.refusal(error))
        if join.ranks and not self._admission.has_all_ranks(but=sender):
            return [refuse, *self.abort(error, but=[sender])]
        self._heartbeats.forget(sender)
        self._admission.remove(sender)
        self._refused = str(error)
        self.remarks.append(f"refused the node on host {join.host} (pid {join.pid}): {error}")
        return [refuse]

    def _fail(self, now: float, sender: bytes, error: BpsError) -> m.Outgoing:
        """Drop the node behind *sender*, whose message makes no sense; if it has ranks, end the job."""
        return self._lose(now, sender, PeerLostError(str(error))) if self._is_dispensable(sender) else self.abort(error)

    def _welcome(self) -> m.Outgoing:
        """Start the job with the nodes that have joined: all nodes with ranks, and maybe not all helpers."""
        n_missing = self._admission.n_missing_helpers
        try:
            self._begin_with(Roster(self._admission.roster()), is_short=n_missing > 0)
        except ConfigError as exc:
            return self.abort(exc)
        if n_missing > 0:
            self.remarks.append(
                f"the job starts without {n_missing} of its helpers, which have not joined within "
                f"{_HELPERS_WAIT * self.settings.start_timeout_s:g} s (half of start_timeout_s): they may still come")
        return [(sender, m.Welcome(index=index, epoch=FIRST_EPOCH, nodes=self.roster.nodes, job=self.name))
                for index, sender in enumerate(self.roster.senders)]

    def _begin_with(self, roster: Roster, is_short: bool = True) -> None:
        """Begin to decide for the nodes of *roster*; *is_short*: maybe not all helpers are among them."""
        settings = self.settings
        self._generations = Generations(
            roster.nodes, policy=settings.placement, partition_nbytes=settings.partition_nbytes,
            fusion_nbytes=settings.fusion_nbytes, first_round=settings.first_round, is_short=is_short)
        self._losses = NodeLosses(roster, self._generations, settings.start_timeout_s)
        self._late_joins = LateJoins(roster, self._admission, settings)
        self._declarations = Declarations(roster.size, roster.lost_ranks)
        self._barriers = Barriers(roster.size, roster.lost_ranks)
        self.roster = roster
        self._measuring = NicRates(roster.nodes)
        self._queries = RankQueries(roster, self._left, self._barriers, self._declarations, self._generations,
                                    self._measuring.waiting, self._losses)
        self._planning = GenerationPlanner(roster, self._declarations, self._generations, self._losses,
                                           self._measuring.waiting)
        self._handlers |= self._queries.handlers
        self.admitted = True

    def is_loss_open(self, settled_epoch: int) -> bool:
        """Whether the loss of a node that has committed *settled_epoch* may be void: it is not committed here, or a
        later epoch is committed elsewhere.
        """
        return self._losses.recovery is not None or settled_epoch > self._losses.settled_epoch

    def resume(self, now: float, snapshot: JobSnapshot) -> m.Outgoing:
        """Continue where another scheduler stopped."""
        self._begin_with(snapshot.roster)
        self.name = snapshot.job
        self._heartbeats.restart(now, set(snapshot.roster.alive_senders) - {b""})
        self.roster.lost |= snapshot.lost
        self.roster.lost_ranks |= snapshot.lost_ranks
        self._measuring.resume(snapshot.rates, snapshot.unmeasured)
        self._update_nodes()
        self._generations.resume(snapshot)
        self._declarations.resume(snapshot.committed, snapshot.failed, snapshot.n_declared)
        self._barriers.resume(snapshot.barrier)
        senders = snapshot.roster.senders
        out = [(senders[index], message) for index, messages in snapshot.answers.items() for message in messages]
        out += self._losses.resume(now, snapshot)
        for index, message in snapshot.later:
            out += self.receive(now, senders[index], message)
        return out

    def _measured(self, now: float, sender: bytes, message: m.Measured) -> m.Outgoing:
        """Take a node's measurement; after the last one, tell all nodes, and plan what waited for it."""
        if not self._measuring.measured(self.roster.index_of(sender), message.nic_rate_bytes):
            return self._fail(now, sender, ProtocolError(f"{self._name(sender)} has measured its NIC, and was not to"))
        return self._all_measured(now)

    def _all_measured(self, now: float) -> m.Outgoing:
        if self._measuring.waiting:
            return []
        self._update_nodes()
        return self._to_all(self._measuring.message) + self._integrate_newcomers(now) + self._planning.plan()

    def _ready(self, now: float, sender: bytes, message: m.Ready) -> m.Outgoing:
        index = self.roster.index_of(sender)
        self._generations.can_own(index, message.ownable_nbytes)
        commits = self._losses.ready(index, message.generation)
        return commits + self._resume_deferred(now) if commits else self._planning.ready(index, message.generation)

    def _set_credit(self, now: float, sender: bytes, message: m.Credit) -> m.Outgoing:
        self._credit = m.CreditChanged(nbytes=message.nbytes)
        return self._to_all(self._credit, True)

    def _room(self, now: float, sender: bytes, message: m.MemoryFreed) -> m.Outgoing:
        self._generations.can_own(self.roster.index_of(sender), message.ownable_nbytes)
        return []

    # -- waiting and leaving ------------------------------------------------------------------------------

    def _rank_left(self, now: float, sender: bytes, message: m.RankLeft) -> m.Outgoing:
        self._left.add(message.rank)
        if not self._all_have_left:
            answers = self._queries.rank_left(message.rank)
            return (self._to_all(m.FirstRankLeft(rank=message.rank)) if len(self._left) == 1 else []) + answers
        return self.finish([sender for sender, _ in self._to_all(m.Finish(), True)])

    @property
    def _all_have_left(self) -> bool:
        return self._left.issuperset(self.roster.ranks)

    def finish(self, senders: Sequence[bytes]) -> m.Outgoing:
        """All ranks have left: tell *senders*, and wait for their acknowledgement."""
        self.finished = True
        self._unacknowledged.update(senders)
        return [(sender, m.Finish()) for sender in senders]

    def finish_again(self, sender: bytes, node: int) -> m.Outgoing:
        """Tell *node*, which has reconnected as *sender*, what it has missed."""
        if node < len(self.roster.nodes):
            self._unacknowledged.discard(self.roster.senders[node])
        return self.finish([sender])

    # -- losses -------------------------------------------------------------------------------------------

    def _lost(self, now: float, sender: bytes, message: m.Lost) -> m.Outgoing:
        error = PeerLostError(f"{self.roster.describe(message.who)} is lost: {message.reason} (seen by "
                              f"{self._name(sender)})")
        node, rank = number_of("node", message.who), number_of("rank", message.who)
        if self.admitted and self.settings.min_workers and self.roster.node_of(rank) == self.roster.index_of(sender):
            return self._lose_rank(now, rank, error)
        if not self.admitted and self._is_dispensable(sender):
            return self._lose(now, sender, error)
        if not self.admitted or not 0 <= node < len(self.roster.nodes):
            return self.abort(error)
        if message.is_fatal and self.settings.min_workers and not self._is_dispensable(sender):
            return self.abort(ProtocolError(str(error)))
        if node in self.roster.lost:
            return []
        lost = self.roster.senders[node]
        if lost != sender and self._losses.is_worker(lost) and not self._losses.is_worker(sender):
            self._losses.suspect(now, lost, sender, error)
            return []
        if lost != sender and self.settings.min_workers and self._losses.is_worker(lost) and not (
                self._probes.is_closed(node) and self._losses.has_majority(but=[lost])):
            self._losses.accuse(now, lost, sender, error)
            return []
        return self._lose(now, lost, error, is_dead=lost == sender)

    def _lose(self, now: float, sender: bytes, error: PeerLostError, is_dead: bool = False) -> m.Outgoing:
        """Drop the node behind *sender* if it has no ranks, or the job goes on without them; else end it with *error*.

        *is_dead*: its process has ended. If it may live, and the others are no majority, nothing is done: it may be
        among a majority that has another scheduler. It is dropped once it is proven dead, or heard no more.
        """
        if self.over or sender not in self._heartbeats:
            return []
        if not self._is_dispensable(sender):
            ranks = self.roster.left_on(self.roster.index_of(sender)) if self.admitted else []
            too_few = self._too_few_without(ranks, error)
            if too_few is not None:
                return self.abort(too_few)
            if is_dead:
                self._losses.note_dead(sender)
            elif not self._losses.has_majority(but=[sender]):
                return []
            return self._lose_worker(now, sender, ranks, error)
        self._heartbeats.forget(sender)
        if not self.admitted:
            self._admission.remove(sender)
            self.remarks.append(f"the job gathers without a helper that had joined: {error}")
            return [(sender, m.dropped(error))]
        index = self.roster.index_of(sender)
        if self._late_joins.is_coming(index):
            return self._late_joins.give_up(index, error)
        out = self._losses.lose(now, sender, error)
        if self._measuring.give_up(index):
            out = self._all_measured(now) + out  # what waits for it is planned after the commit
        return out

    def _too_few_without(self, ranks: Collection[int], error: PeerLostError) -> PeerLostError | None:
        """Return why the job cannot go on without *ranks*, which *error* has ended; None if it can."""
        if not self.admitted or not self.settings.min_workers:
            return error
        n_left = len(self.roster.ranks) - len(ranks)
        if n_left >= self.settings.min_workers:
            return None
        return PeerLostError(f"{error}; {n_left} ranks are left, fewer than BPSFAST_MIN_WORKERS = "
                             f"{self.settings.min_workers}, so the job ends")

    def _lose_worker(self, now: float, sender: bytes, ranks: Collection[int], error: PeerLostError) -> m.Outgoing:
        """Go on without the node behind *sender*, whose last *ranks* these are."""
        self._heartbeats.forget(sender)
        out: m.Outgoing = []
        for index in self._late_joins.coming:  # they connect to the lost node, or have been told of it
            self._heartbeats.forget(self.roster.senders[index])
            out += self._late_joins.give_up(index, error)
        out += self._losses.lose(now, sender, error)
        if self._measuring.give_up(self.roster.index_of(sender)):
            out = self._all_measured(now) + out
        return out + self._ranks_lost(ranks)

    def _lose_rank(self, now: float, rank: int, error: PeerLostError) -> m.Outgoing:
        """Go on without *rank*, and without its node if it was the last one there."""
        node = self.roster.node_of(rank)
        if rank in self.roster.lost_ranks or rank in self._left:
            return []
        too_few = self._too_few_without([rank], error)
        if too_few is not None:
            return self.abort(too_few)
        if self.roster.left_on(node) == [rank]:
            self._losses.note_dead(self.roster.senders[node])  # whose own word that is
            return self._lose_worker(now, self.roster.senders[node], [rank], error)
        return self._losses.lose_rank(now, rank, error) + self._ranks_lost([rank])

    def _ranks_lost(self, ranks: Collection[int]) -> m.Outgoing:
        """Answer what waited only for *ranks*, which are lost."""
        out = [answer for rank in ranks for answer in self._queries.rank_left(rank)]
        out += [each for sequence in self._barriers.rank_lost()
                for each in self._to_all(m.BarrierDone(sequence=sequence))]
        if self._all_have_left:
            out += self.finish([sender for sender, _ in self._to_all(m.Finish(), True)])
        return out

    def _resume_deferred(self, now: float) -> m.Outgoing:
        """Do what was deferred until a recovery's commit; newcomers come first."""
        out = self._integrate_newcomers(now)
        if self._losses.recovery is not None:
            return out
        deferred, self._deferred = self._deferred, []
        out += (self._planning.rank_lost() if self.roster.lost_ranks else []) + self._planning.plan()
        for sender, message in deferred:
            out += self.receive(now, sender, message)
        return out

    def _name(self, sender: bytes) -> str:
        """Describe the node behind *sender*."""
        if self.admitted:
            return self.roster.describe_node(self.roster.index_of(sender))
        join = self._admission.joins[sender]
        return f"the node on host {join.host} (pid {join.pid}, {len(join.ranks)} ranks)"

    def _to_all(self, message: m.Message, and_newcomers: bool = False) -> m.Outgoing:
        senders = self.roster.alive_senders if self.admitted else list(self._admission.joins)
        if and_newcomers:
            senders += self.coming
        return [(sender, message) for sender in senders]

