"""Rebuilds the state of a job from its nodes' reports, after its scheduler was lost or restarted. Pure, as `Job` is.

Every node reports all it knows (`ControlLog.report`); `merge_reports` merges it. A recovery that was in progress
begins anew, in a new epoch.

Nothing is decided before a majority of the nodes with ranks has reported (`may_decide`). So of two schedulers of one
job, on two sides of a network partition, at most one decides anything.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from .. import messages as m
from ..errors import BpsError, MismatchError, PeerLostError, ProtocolError, StallError
from ..job.admission import MOST_NAMED, difference
from ..job.liveness import NodeProbes
from ..job.recovery import JobSnapshot
from ..roster import describe_node, may_decide
from .state_merge import NodeReport, NodeReports, merge_reports

#: Only these messages can complete a rebuild.
_DECISIVE = (m.Join, m.Rejoin, m.RejoinComplete, m.RankLeft, m.Lost, m.ProbeResult)


class JobRebuild:
    """One rebuild of one job, from the first report to the last. Owner thread only; *now* as for `Job`.

    Parameters
    ----------
    recall
        The number of the `RejoinRequest` that reports answer. A node that reconnects answers none.
    known
        The nodes that were asked, and when each was heard, by connection.
    job, nodes
        The job's name and nodes; "" if it is not known which one it is: then the first report says it.
    fingerprint
        The settings that all nodes must have; None: those of the first report.
    min_workers
        As in `JobSettings`: with how few ranks the job goes on, if others are lost meanwhile.
    lost
        The nodes that are lost for certain, because there was no other scheduler.
    short_s
        How long to go on without a majority; *timeout_s* if that is shorter.
    short_since
        When a majority was heard last, if an earlier rebuild has ended without one.
    """

    def __init__(self, package: str, *, heartbeat_s: float, lease_s: float, timeout_s: float, now: float,
                 recall: int = 0, known: Mapping[bytes, tuple[int, float]] | None = None,
                 nodes: Sequence[m.NodeInfo] = (), job: str = "",
                 fingerprint: Mapping[str, str] | None = None, min_workers: int = 0,
                 lost: Collection[int] = (), short_s: float = math.inf, short_since: float | None = None) -> None:
        self.recall = recall
        self.aborted: BpsError | None = None
        self._package, self._fingerprint = package, fingerprint
        self._min_workers = min_workers
        self._heartbeat_s, self._lease_s, self._timeout_s = heartbeat_s, lease_s, timeout_s
        self._short_s = short_s
        #: Since when no majority is heard.
        self.short_since = now if short_since is None else short_since
        self._began = self._last_tick = self._next_heartbeat = now
        self._n_heartbeats = 0
        self._heard = {sender: heard for sender, (_, heard) in (known or {}).items()}
        self._known: dict[int, list[bytes]] = {}
        for sender, (index, _) in (known or {}).items():
            self._known.setdefault(index, []).append(sender)
        self._reports = NodeReports(tuple(nodes), lost)
        self._joins: dict[bytes, m.Join] = {}
        self._all_left: set[int] = set()  # nodes whose ranks have all left, as they reported
        self._first = m.Rejoin(version=m.VERSION, package=package, settings={}, job=job, index=0,
                               nodes=tuple(nodes)) if job else None
        self._majority_since: float | None = None
        self._dead: set[int] = set()  # nodes with ranks that a job which goes on without them does not wait for
        self._probes = NodeProbes(lease_s, timeout_s, now)
        #: Whether a message has come since the last look that may change `finished`, `aborted` or `snapshot`.
        self.is_due = True

    def knows(self, sender: bytes) -> bool:
        """Whether *sender* has begun to report."""
        return sender in self._reports.by_sender

    def note_heard(self, now: float, sender: bytes) -> None:
        """Note that *sender*, if it reports, lives."""
        if sender in self._heard:
            self._heard[sender] = now

    def receive(self, now: float, sender: bytes, message: m.Message) -> m.Outgoing:
        """Take one message; return what is to be answered."""
        report = self._reports.by_sender.get(sender)
        self.is_due |= isinstance(message, _DECISIVE)
        if isinstance(message, m.Heartbeat):
            if sender in self._heard:
                self._heard[sender] = now
        elif isinstance(message, m.Rejoin):
            return self._rejoin(now, sender, message)
        elif isinstance(message, m.Join):
            if message.version != m.VERSION:
                return [(sender, m.refusal(m.version_mismatch(message.version, f"host {message.host}")))]
            self._heard[sender] = now
            self._joins[sender] = message
            self._match()
        elif isinstance(message, m.ProbeResult):
            if report is not None and report.ranks:
                self._probes.probed(now, message)
        elif report is not None:
            self._heard[sender] = now
            self._reports.enter(report, message)
            if isinstance(message, m.RejoinComplete) and report.n_units != report.rejoin.n_units:
                self.aborted = ProtocolError(
                    f"{describe_node(self._nodes, report.index)} has {report.rejoin.n_units} committed units, and "
                    f"has told {report.n_units}: after a loss of the scheduler the job cannot be rebuilt")
            if report.ranks and report.left.union(report.rejoin.lost_ranks) >= set(report.ranks):
                self._all_left.add(report.index)
        return []

    def unreadable(self, sender: bytes, error: BpsError) -> m.Outgoing:
        """Decide what follows from a message of *sender* that cannot be read, because of *error*; as `Job`."""
        report = self._reports.by_sender.get(sender)
        index = report.index if report is not None else next(
            (index for index, senders in self._known.items() if sender in senders), -1)
        if index < 0:
            return [(sender, m.refusal(error))]
        self.is_due = True
        words = f"a message of {describe_node(self._nodes, index)} cannot be read: {error}"
        if self._nodes[index].ranks:
            self.aborted = ProtocolError(words)
            return []
        self.unreachable(sender)
        self._reports.called_lost.add(index)
        return [(sender, m.dropped(words))]

    def unreachable(self, sender: bytes) -> None:
        """Forget what *sender*, whose connection is closed, has reported: the node reports again if it lives."""
        self._heard.pop(sender, None)
        self._joins.pop(sender, None)
        self._reports.drop(sender)
        self.is_due = True

    def _rejoin(self, now: float, sender: bytes, rejoin: m.Rejoin) -> m.Outgoing:
        if sender in self._heard and rejoin.recall != self.recall:
            return []  # its answer to this request is on its way
        refused = self._objection(rejoin)
        if refused is not None:
            return [(sender, m.refusal(refused))]
        if self._first is None:
            self._first = rejoin
        if self._fingerprint is None:
            self._fingerprint = rejoin.settings
        if rejoin.index in self._reports.settled_lost:
            return [(sender, _left_out())]
        self._heard[sender] = now
        settled_epoch = self._reports.settled_epoch
        if rejoin.nodes == self._nodes:  # kept once: a thousand nodes know a thousand each
            rejoin = msgspec.structs.replace(rejoin, nodes=self._nodes)
        self._reports.begin(sender, NodeReport(rejoin))
        self._match()
        return self._drop_settled() if self._reports.settled_epoch > settled_epoch else []

    def _drop_settled(self) -> m.Outgoing:
        """Drop the nodes that an epoch is without which another node has committed, and what they have said of others.

        Nodes that are lost in an epoch that may not be committed are told when the job is rebuilt: until then a report
        may come that those who call them lost are lost themselves.
        """
        out: m.Outgoing = []
        for index in self._reports.settled_lost & self._reports.sender_of.keys():
            sender = self._reports.sender_of[index]
            self.unreachable(sender)
            out.append((sender, _left_out()))
        return out

    def _objection(self, rejoin: m.Rejoin) -> BpsError | None:
        if rejoin.version != m.VERSION or (self._package and rejoin.package != self._package):
            return MismatchError(f"node {rejoin.index} has version {rejoin.package} (protocol {rejoin.version}), the "
                                 f"scheduler {self._package} (protocol {m.VERSION}); install one version everywhere")
        first = self._first
        if not 0 <= rejoin.index < len(rejoin.nodes):
            return ProtocolError(f"a node says that it is node {rejoin.index} of {len(rejoin.nodes)}")
        if first is not None and rejoin.job != first.job:
            return PeerLostError(f"the scheduler of this job is gone: at its address is that of another one (job "
                                 f"{first.job}, of {len(first.nodes)} nodes, not {rejoin.job})")
        differs = difference(rejoin.settings, self._fingerprint) if self._fingerprint is not None else None
        if differs is not None:
            field, theirs, ours = differs
            return MismatchError(f"setting {field} differs: {theirs} on {describe_node(rejoin.nodes, rejoin.index)}, "
                                 f"{ours} where the job's new scheduler was started; all roles of a job must agree")
        return None

    def _match(self) -> None:
        """Find the nodes that never had a `Welcome`, and know nothing."""
        first = self._first
        if first is None:
            return
        nodes = self._nodes
        for sender, join in list(self._joins.items()):
            index = self._reports.find_node(join)
            if index is not None and index not in self._reports.joining:  # those join anew
                del self._joins[sender]
                self._reports.begin(sender, NodeReport(
                    m.Rejoin(version=m.VERSION, package=join.package, settings=join.settings, job=first.job,
                             index=index, nodes=nodes), is_complete=True, join=join))

    def tick(self, now: float) -> m.Outgoing:
        """Return what follows from the time: heartbeats. Look at `finished`, `aborted` and `snapshot` afterwards."""
        self.is_due = True
        slept_s, self._last_tick = now - self._last_tick, now
        if slept_s > self._lease_s / 2:
            self._heard = {sender: heard + slept_s for sender, heard in self._heard.items()}
            self._began += slept_s
            self.short_since += slept_s
            self._majority_since = self._majority_since + slept_s if self._majority_since is not None else None
        if now - self._began >= self._timeout_s:
            self.aborted = StallError(f"the scheduler was lost, and {self._timeout_s:g} s (start_timeout_s) after "
                                      f"another one began too few nodes have told it what they know: "
                                      f"{self._describe()}")
        is_alive = self.is_alive
        self.short_since = now if is_alive else self.short_since
        if now - self.short_since >= self._short_s:
            self.aborted = StallError(f"{no_majority(self._short_s)}: {self._describe()}")
        out = self._probe_silent(now)
        if now < self._next_heartbeat:
            return out
        self._next_heartbeat = now + self._heartbeat_s
        self._n_heartbeats += 1
        heartbeat = m.Heartbeat(sequence=self._n_heartbeats, is_short=not is_alive)
        return out + [(sender, heartbeat) for sender in self.senders]

    def _probe_silent(self, now: float) -> m.Outgoing:
        """Have the nodes with ranks that have reported probe those that are not heard."""
        if self._majority_since is None and not self._min_workers:
            return []
        told = [(index, self._reports.sender_of[index])
                for index in sorted(self._reports.complete & self._reports.workers)]
        missing = set(range(len(self._nodes))) - self._reports.sender_of.keys() - self._reports.lost
        for index in self._lost_voters:
            self._probes.closed(now, index)
            missing.add(index)
        return [each for index in sorted(missing)
                for each in self._probes.ask(now, index, self._heard_at(index), lambda: told)]

    @property
    def senders(self) -> list[bytes]:
        """The connections that must hear how it ends."""
        return list(dict.fromkeys([*self.reporting, *self._joins, *self._heard]))

    @property
    def newcomers(self) -> list[tuple[bytes, m.Join]]:
        """The nodes that have joined and never were in the job."""
        return list(self._joins.items())

    @property
    def reporting(self) -> list[bytes]:
        """The connections that have begun to report."""
        return list(self._reports.by_sender)

    @property
    def another(self) -> m.Join | None:
        """The `Join` of the first node with ranks that is in no report: another job gathers here."""
        if self._first is None:
            return None
        return next((join for join in self._joins.values() if join.ranks), None)

    @property
    def is_alive(self) -> bool:
        """Whether a majority has begun to report, without nodes that others call lost, as `snapshot` is."""
        return may_decide(self._reports.sender_of.keys() - self._reports.lost, self._reports.voters, self._dead)

    @property
    def finished(self) -> bool:
        """Whether all ranks of the job have left."""
        return self._first is not None and self._all_left | self._reports.nodes_left >= self._reports.workers

    def snapshot(self, now: float) -> JobSnapshot | None:
        """Return the job's state once all nodes have reported or are lost; None before.

        Raises `PeerLostError` if a node is lost that the job cannot go on without; `ProtocolError` if reports
        contradict what schedulers do.
        """
        if self._first is None:
            return None
        nodes, lost, left_behind = self._nodes, self._reports.lost, self._reports.left_behind
        told = self._reports.complete - lost - left_behind
        self._find_dead(now)
        voters = self._reports.voters
        if not may_decide(told, voters, self._dead):
            self._majority_since = None
            return None
        self._majority_since = now if self._majority_since is None else self._majority_since
        missing = set(range(len(nodes))) - told - lost
        if any(not self._is_given_up(now, index) for index in missing - left_behind):
            return None
        gone = sorted(missing & self._reports.workers)
        n_left = self._n_left(gone) if gone else 0
        if gone and not 0 < self._min_workers <= n_left:
            names = "; ".join(describe_node(nodes, index) for index in gone)
            few = f"; {n_left} ranks are left, fewer than BPSFAST_MIN_WORKERS = {self._min_workers}"
            raise PeerLostError(f"{names} did not come back within lease_s = {self._lease_s:g} s, after the scheduler "
                                f"was lost{few if self._min_workers else ''}")
        senders = {index: self._reports.sender_of[index] for index in sorted(told)}
        reports = {index: self._reports.by_sender[sender] for index, sender in senders.items()}
        return merge_reports(nodes, reports, senders, lost, sorted(missing), voters, frozenset(self._dead),
                             self._reports.settled_epoch)

    def _find_dead(self, now: float) -> None:
        """Find nodes with ranks that are silent for a lease, and whose data port refuses connections, so that their
        process is dead: if only such ones are missing, the job goes on without them. A network that is cut refuses
        nothing. If the scheduler before has dropped a node, refusing for a while is enough.
        """
        missing = self._reports.workers - self._reports.sender_of.keys() if self._min_workers else set()
        self._dead = {index for index in missing if index in self._dead or (
            self._probes.is_refused(now, index) and now - self._heard_at(index) >= self._lease_s)} | {
            index for index in self._lost_voters
            if index in self._dead or self._probes.is_dead(now, index, has_ranks=True)}

    @property
    def _lost_voters(self) -> set[int]:
        """The nodes with ranks that count for the majority, though the scheduler before has dropped them."""
        return set(self._reports.voters & self._reports.lost) if self._min_workers else set()

    def _n_left(self, gone: Sequence[int]) -> int:
        """Return how many ranks are not lost if nodes *gone* are."""
        lost = self._reports.lost_ranks.union(*(self._nodes[index].ranks for index in gone))
        return sum(rank not in lost for node in self._nodes for rank in node.ranks)

    @property
    def _nodes(self) -> tuple[m.NodeInfo, ...]:
        return self._reports.nodes

    def _is_given_up(self, now: float, index: int) -> bool:
        """Whether node *index*, which has not reported all, is lost: called lost by one with ranks, or silent."""
        if index in self._dead:
            return True
        only_sums = not self._nodes[index].ranks
        called = index in self._reports.called_lost or self._probes.is_refused(now, index)
        if only_sums and called and not self._open_connections_of(index):
            return True
        heard = self._heard_at(index)
        return now - heard >= self._lease_s and (only_sums or not self._probes.lives(now, index, heard))

    def _open_connections_of(self, index: int) -> list[bytes]:
        """Return the connections of node *index* that have not closed."""
        own = self._reports.sender_of.get(index)
        return ([] if own is None else [own]) + [
            sender for sender in self._known.get(index, ()) if sender in self._heard]

    def _heard_at(self, index: int) -> float:
        """Return when node *index* was heard last, but not before there was a majority."""
        return max([self._majority_since or self._began,
                    *(self._heard.get(sender, 0.0) for sender in self._open_connections_of(index))])

    def _describe(self) -> str:
        if self._first is None:
            return "none was ever welcomed"
        over = self._reports.complete | self._reports.lost
        missing = [describe_node(self._nodes, node.index) for node in self._nodes if node.index not in over]
        more = f"; {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        return f"missing {'; '.join(missing[:MOST_NAMED]) or 'nobody'}{more}"


def no_majority(for_s: float) -> str:
    """Return why a scheduler ends that has heard no majority *for_s*."""
    return f"this scheduler has not heard a majority of the nodes with ranks for {for_s:g} s"


def _left_out() -> m.Abort:
    return m.dropped("the job goes on without this node, which it has lost")
