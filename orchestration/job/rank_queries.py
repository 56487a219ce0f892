"""Answers what ranks ask of the whole job: barriers, who is missing, who is late, values that others stored. Pure.

The scheduler knows some answers; for the rest it asks all nodes and combines their reports. Each question is answered
once, in time: nodes that do not report are named.

Lags: a node compares its own ranks by when they announced their inputs, and, for units that it owns, all inputs by when
they came, which includes the time on the network. Clocks of machines are never compared.
"""
from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .. import messages as m
from ..roster import Roster
from .declarations import Declarations
from .generations import Generations
from .key_value_store import KeyValueStore
from .node_losses import NodeLosses

#: Nodes that do not report within this time are named as silent: the rank that asks has a deadline, too.
REPORT_TIMEOUT_S = 1.5
#: Of the stages that nodes report, the earliest one counts.
_STAGES: tuple[m.Stage, ...] = ("push", "partial", "sum", "result")
_ADVICE = ". Waiting on cannot help: all ranks must do the same pushes and barriers before they leave"


Key = TypeVar("Key")


@dataclass
class _Inquiry:
    """A question to all nodes: its deadline, the ranks' questions that it answers, and the reports by node."""

    deadline: float
    askers: list[Any]
    reports: dict[int, Any] = field(default_factory=dict)


class _Inquiries(abc.ABC, Generic[Key]):
    """Open questions to all nodes, by key; `_conclude` makes the answers once all have reported, or the time is up."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._open: dict[Key, _Inquiry] = {}

    def _report(self, key: Key, node: int, report: Any) -> list[Any]:
        """Take *node*'s report; return the answers if it was the last. Late reports are ignored."""
        inquiry = self._open.get(key)
        if inquiry is None:
            return []
        inquiry.reports[node] = report
        return self._conclude(self._open.pop(key)) if inquiry.reports.keys() >= set(self._roster.alive) else []

    def expire(self, now: float) -> list[Any]:
        """Return the answers to questions whose deadline has passed; they name the nodes that did not report."""
        late = [key for key, inquiry in self._open.items() if now >= inquiry.deadline]
        return [answer for key in late for answer in self._conclude(self._open.pop(key))]

    @abc.abstractmethod
    def _conclude(self, inquiry: _Inquiry) -> list[Any]:
        """Return the answers to the question of *inquiry*."""


@dataclass(frozen=True)
class StallFinding:
    """What is known of a wait: the fields of a `StallAnswer`, `missing` without advice."""

    missing: str
    stage: m.Stage
    hopeless: bool = False
    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


class StallQueries(_Inquiries[tuple[int, int]]):
    """Open questions about stalled partitions, by (part, round).

    `left(rank)`: whether a rank has called shutdown.
    """

    def __init__(self, roster: Roster, left: Callable[[int], bool]) -> None:
        super().__init__(roster)
        self._left = left

    def ask(self, now: float, question: m.StallQuestion) -> bool:
        """Take *question*; return whether the nodes have to be asked (they are not asked twice at a time)."""
        inquiry = self._open.get((question.part, question.round))
        if inquiry is not None:
            inquiry.askers.append(question)
            return False
        self._open[question.part, question.round] = _Inquiry(now + REPORT_TIMEOUT_S, [question])
        return True

    def report(self, node: int, report: m.StallReport) -> list[m.StallAnswer]:
        """Take *node*'s report; return the answers if it was the last. Late reports are ignored."""
        return self._report((report.part, report.round), node, report)

    def _conclude(self, inquiry: _Inquiry) -> list[m.StallAnswer]:
        finding = self._find(inquiry.reports)
        return [self.answer(asker, finding) for asker in inquiry.askers]

    @staticmethod
    def answer(question: m.StallQuestion, finding: StallFinding) -> m.StallAnswer:
        """Return the answer to *question*, with advice if waiting is hopeless."""
        return m.StallAnswer(rank=question.rank, question=question.question, stage=finding.stage,
                             hopeless=finding.hopeless, ranks=finding.ranks, nodes=finding.nodes,
                             missing=finding.missing + _ADVICE if finding.hopeless else finding.missing)

    def _find(self, reports: dict[int, m.StallReport]) -> StallFinding:
        describe = self._roster.describe_node
        stages = [report.stage for report in reports.values()]
        stage: m.Stage = next((each for each in _STAGES if each in stages), "done")
        ranks = {rank for report in reports.values() for rank in report.missing_ranks}
        silent = {node for node in self._roster.alive if node not in reports}
        if stage == "done" and silent:
            stage = "unknown"
        texts = [self.rank_is_missing(rank, "has not pushed") for rank in sorted(ranks)]
        # A node that waits for its own ranks is not to blame for what it cannot send yet.
        waiting = {self._roster.node_of(rank) for rank in ranks} | silent
        kind = "result" if stage == "result" else "partial sum"
        late: dict[int, list[int]] = {}  # node -> the nodes that have not got its data
        for at, report in sorted(reports.items()):
            if (report.stage == "result") == (stage == "result"):
                for node in report.missing_nodes:
                    late.setdefault(node, []).append(at)
        blamed = sorted(set(late) - waiting)
        texts += [f"{describe(node)}: its {kind} has not arrived at node {', '.join(map(str, late[node]))}"
                  for node in blamed]
        texts += [f"{describe(node)}: does not answer" for node in sorted(silent)]
        nobody = "all have pushed" + (", the sum is still to be made" if stage == "sum" else "")
        return StallFinding(missing="missing: " + "; ".join(texts) if texts else f"nobody is missing: {nobody}",
                            stage=stage, hopeless=any(report.gone_ranks for report in reports.values()),
                            ranks=tuple(sorted(ranks)), nodes=tuple(sorted({*blamed, *silent})))

    def rank_is_missing(self, rank: int, verb: str) -> str:
        """Describe that *rank* "has not pushed" (*verb*), or that it never will because it has left."""
        what = "is lost" if rank in self._roster.lost_ranks else "has called shutdown" if self._left(rank) else verb
        return f"{self._roster.describe_rank(rank)}: {what}"

    def without(self, ranks: Iterable[int], stage: m.Stage, verb: str) -> StallFinding:
        """Return that *ranks* are missing from something; waiting is hopeless if one of them has left."""
        ranks = tuple(ranks)
        return StallFinding("missing: " + "; ".join(self.rank_is_missing(rank, verb) for rank in ranks), stage,
                            any(map(self._left, ranks)), ranks)


class LagQueries(_Inquiries[int]):
    """Open questions of ranks about lags, by number."""

    def __init__(self, roster: Roster) -> None:
        super().__init__(roster)
        self._n_asked = 0

    def ask(self, now: float, asker: m.LagQuestion) -> int:
        """Take a question; return the number under which all nodes report."""
        self._n_asked += 1
        self._open[self._n_asked] = _Inquiry(now + REPORT_TIMEOUT_S, [asker])
        return self._n_asked

    def report(self, node: int, report: m.LagReport) -> list[m.LagAnswer]:
        """Take *node*'s report; return the answer if it was the last. Late reports are ignored."""
        return self._report(report.number, node, report)

    def _conclude(self, inquiry: _Inquiry) -> list[m.LagAnswer]:
        silent = tuple(index for index in self._roster.alive if index not in inquiry.reports)
        return [m.LagAnswer(rank=asker.rank, question=asker.question, ranks=combined(inquiry.reports),
                            silent_nodes=silent) for asker in inquiry.askers]


def combined(reports: dict[int, m.LagReport]) -> tuple[m.RankLag, ...]:
    """Return the lags of all ranks in *reports* (by node), in the order of ranks.

    An owner sees a rank of its own machine as it is. Of another machine it sees the sum, which arrives once the last
    rank has pushed: a rank was earlier than that by its mean distance from the last one on its machine, and was the
    last one as often as on its machine.
    """
    seen: dict[int, list[m.LagRow]] = {}  # by node, at all owners
    for report in reports.values():
        for row in report.owned:
            if row.node >= 0:
                seen.setdefault(row.node, []).append(row)
    found = []
    for index, report in reports.items():
        own = {row.rank: row for row in report.owned if row.rank >= 0}
        n_units = sum(row.n_last for row in report.local)
        spread_ns = sum(row.last_total_ns for row in report.local) / n_units if n_units else 0.0
        elsewhere = seen.get(index, [])
        count = sum(row.count for row in elsewhere)
        total_ns = sum(row.total_ns for row in elsewhere)
        n_last = sum(row.n_last for row in elsewhere)
        for row in report.local:
            here = own.get(row.rank, m.LagRow(rank=row.rank))
            early_ns = spread_ns - row.total_ns / row.count
            all_ns = here.total_ns + max(0.0, total_ns - count * early_ns)
            times_last = here.n_last + n_last * row.n_last / n_units
            n = here.count + count
            found.append(m.RankLag(rank=row.rank, count=n, mean_s=all_ns / n / 1e9 if n else 0.0,
                                   last_share=times_last / n if n else 0.0))
    return tuple(sorted(found, key=lambda each: each.rank))


class Barriers:
    """Which of *size* ranks have entered which barrier: a rank's i-th barrier meets every other rank's i-th.

    Those in *lost*, which changes, need not.
    """

    def __init__(self, size: int, lost: AbstractSet[int] = frozenset()) -> None:
        self._size = size
        self._lost = lost
        self._entered: dict[int, set[int]] = {}
        self._done = set[int]()

    def resume(self, done: int) -> None:
        """Note that barriers up to *done* are done."""
        self._done = {done - 1, done}

    def enter(self, rank: int, sequence: int) -> bool:
        """Note that *rank* is at barrier *sequence*; return, once, whether it was the last rank."""
        if sequence in self._done:
            return False
        self._entered.setdefault(sequence, set()).add(rank)
        return self._is_complete(sequence)

    def rank_lost(self) -> list[int]:
        """Return the barriers that all ranks have entered that are not lost: one more is."""
        return [sequence for sequence in sorted(self._entered) if self._is_complete(sequence)]

    def _is_complete(self, sequence: int) -> bool:
        if len(self._entered[sequence] | self._lost) < self._size:
            return False
        del self._entered[sequence]
        self._done.add(sequence)
        self._done.discard(sequence - 2)  # no rank enters i + 1 before all have left i - 1
        return True

    def missing(self, sequence: int) -> list[int]:
        """Return the ranks that have not entered barrier *sequence*."""
        if sequence in self._done:
            return []
        entered = self._entered.get(sequence, set())
        return [rank for rank in range(self._size) if rank not in entered and rank not in self._lost]


#: The most ranks that are named as not having left.
_MOST_NAMED = 8


class RankQueries:
    """Answers the questions of all ranks of one job. Parameters are the `Job`'s own objects, which change.

    *left*: ranks that have left. *unmeasured*: nodes that still measure their NIC.
    """

    def __init__(self, roster: Roster, left: AbstractSet[int], barriers: Barriers, declarations: Declarations,
                 generations: Generations, unmeasured: AbstractSet[int], losses: NodeLosses) -> None:
        self._roster = roster
        self._left = left
        self._barriers = barriers
        self._declarations = declarations
        self._generations = generations
        self._unmeasured = unmeasured
        self._losses = losses
        def is_gone(rank: int) -> bool:
            return rank in left or rank in roster.lost_ranks

        self._stalls = StallQueries(roster, left.__contains__)
        self._lags = LagQueries(roster)
        self._store = KeyValueStore(roster, is_gone)
        #: By kind of message: called with the time, the sender and the message; return what is to be sent.
        self.handlers: dict[type, Callable[..., m.Outgoing]] = {
            m.StallQuestion: self._stalled,
            m.StallReport: lambda now, sender, message: self._answers(
                self._stalls.report(roster.index_of(sender), message)),
            m.LagQuestion: lambda now, sender, message: roster.to_all(
                m.LagReportRequest(number=self._lags.ask(now, message))),
            m.LagReport: lambda now, sender, message: self._answers(
                self._lags.report(roster.index_of(sender), message)),
            m.Publish: lambda now, sender, message: self._answers(self._store.publish(message)),
            m.Withdraw: self._withdraw,
            m.Lookup: lambda now, sender, message: self._answers(self._store.lookup(now, message)),
        }

    def expire(self, now: float) -> m.Outgoing:
        """Return the answers to questions that have waited long enough for reports."""
        return self._answers([*self._stalls.expire(now), *self._lags.expire(now), *self._store.expire(now)])

    def rank_left(self, rank: int) -> m.Outgoing:
        """Return the answers to lookups that wait for values of *rank*, which has left or is lost."""
        return self._answers(self._store.rank_left(rank))

    def _stalled(self, now: float, sender: bytes, message: m.StallQuestion) -> m.Outgoing:
        if message.missing:
            return self._answers([self._stalls.answer(message, self._stalls.without(
                message.missing, "push", "has not pushed"))])
        if message.part >= 0:
            if not self._stalls.ask(now, message):
                return []
            return self._roster.to_all(m.StallReportRequest(part=message.part, round=message.round))
        return self._answers([self._stalls.answer(message, self._why_waiting(message.name))])

    def _why_waiting(self, name: str) -> StallFinding:
        """Find what a declaration, a barrier ("barrier:<sequence>") or the job's end (`m.THE_END`) still waits for."""
        kind, _, sequence = name.partition(":")
        if name == m.THE_END:
            ranks = [rank for rank in self._roster.ranks if rank not in self._left]
            words = "; ".join(self._stalls.rank_is_missing(rank, "has not called shutdown")
                              for rank in ranks[:_MOST_NAMED])
            more = f"; and {len(ranks) - _MOST_NAMED} more ranks" if len(ranks) > _MOST_NAMED else ""
            return StallFinding(f"missing: {words}{more}", "barrier", ranks=tuple(ranks))
        if kind == "barrier" and sequence.isdecimal():
            ranks = self._barriers.missing(int(sequence))
            return (self._stalls.without(ranks, "barrier", "has not entered the barrier") if ranks
                    else StallFinding("nobody is missing", "done"))
        failed = self._declarations.why_failed(name)
        if failed is not None:
            return StallFinding(f"the declaration failed: {failed}", "declare")
        recovery = self._losses.recovery
        if recovery is not None:
            nodes = recovery.missing
            words = ", ".join(map(self._roster.describe_node, nodes))
            what = "share the sums with others" if recovery.joined else "go on without what was lost"
            return StallFinding(f"missing: {words}: to {what} ({recovery.reason})", "declare", nodes=tuple(nodes))
        ranks = self._declarations.missing(name)
        if ranks:
            return self._stalls.without(ranks, "declare", f"has not declared {name!r}")
        for nodes, what in ((sorted(self._unmeasured), "is still measuring its NIC"),
                            (self._generations.not_ready(name), f"is still preparing memory for {name!r}"),
                            (self._generations.in_the_way(name), f"is still preparing memory for what is before "
                                                                 f"{name!r}")):
            if nodes:
                words = "; ".join(f"{self._roster.describe_node(node)}: {what}" for node in nodes)
                return StallFinding(f"missing: {words}", "declare", nodes=tuple(nodes))
        return StallFinding(f"nobody is missing: all ranks have declared {name!r}", "done")

    def _withdraw(self, now: float, sender: bytes, message: m.Withdraw) -> m.Outgoing:
        self._store.withdraw(message.rank, message.prefix)
        return []

    def _answers(self, answers: Sequence[m.StallAnswer | m.LagAnswer | m.KeyValueReply]) -> m.Outgoing:
        return [(sender, answer) for answer in answers for sender in self._roster.senders_of([answer.rank])]
