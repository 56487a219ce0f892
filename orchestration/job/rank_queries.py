"""What ranks ask of the whole job: who is missing, who is late, what others have published. Pure.

Some of it the scheduler knows; for the rest it asks all nodes, and puts their reports together. Each question is
answered once, in time: whoever does not report is named.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence, Set as AbstractSet

from .. import messages as m
from ..roster import Roster
from .barriers import Barriers
from .declarations import Declarations
from .generations import Generations
from .key_value_store import KeyValueStore
from .lags import LagQueries
from .node_losses import NodeLosses
from .stalls import StallFinding, StallQueries

Outgoing = list[tuple[bytes, m.Message]]
#: So many ranks that have not left are named.
_MOST_NAMED = 8


class RankQueries:
    """All questions of one job. Parameters are the `Job`'s own, which go on changing; *left*: ranks that have left,
    *unmeasured*: nodes that still measure their NIC.
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
        self._stalls = StallQueries(roster, left.__contains__)
        self._lags = LagQueries(roster)
        self._notices = KeyValueStore(roster, left.__contains__)
        #: By kind of message: called with the time, the sender and the message; return what is to be sent.
        self.handlers: dict[type, Callable[..., Outgoing]] = {
            m.Stalled: self._stalled, m.StallReport: self._stall_report, m.LagQuestion: self._lag_question,
            m.LagReport: self._lag_report, m.Publish: self._publish, m.Withdraw: self._withdraw, m.Lookup: self._lookup,
        }

    def expire(self, now: float) -> Outgoing:
        """Return the answers to what has waited long enough for reports."""
        return self._answers([*self._stalls.expire(now), *self._lags.expire(now), *self._notices.expire(now)])

    def rank_left(self, rank: int) -> Outgoing:
        """Return the answers to those who wait for notices of *rank*, which has left."""
        return self._answers(self._notices.rank_left(rank))

    # -- what comes in ------------------------------------------------------------------------------------

    def _stalled(self, now: float, sender: bytes, message: m.Stalled) -> Outgoing:
        if message.part >= 0:
            if not self._stalls.ask(now, message):
                return []
            return self._to_all(m.StallAsk(part=message.part, round=message.round))
        return self._answers([self._stalls.answer(message, self._why_waiting(message.name))])

    def _why_waiting(self, name: str) -> StallFinding:
        """Say what a declaration, a barrier ("barrier:<sequence>") or the job's end (`m.THE_END`) still waits for, and
        whether that is in vain.
        """
        kind, _, sequence = name.partition(":")
        if name == m.THE_END:
            ranks = [rank for rank in range(self._roster.size) if rank not in self._left]
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

    def _stall_report(self, now: float, sender: bytes, message: m.StallReport) -> Outgoing:
        return self._answers(self._stalls.report(self._roster.index_of(sender), message))

    def _lag_question(self, now: float, sender: bytes, message: m.LagQuestion) -> Outgoing:
        return self._to_all(m.LagAsk(number=self._lags.ask(now, message)))

    def _lag_report(self, now: float, sender: bytes, message: m.LagReport) -> Outgoing:
        return self._answers(self._lags.report(self._roster.index_of(sender), message))

    def _publish(self, now: float, sender: bytes, message: m.Publish) -> Outgoing:
        return self._answers(self._notices.publish(message))

    def _withdraw(self, now: float, sender: bytes, message: m.Withdraw) -> Outgoing:
        self._notices.withdraw(message.rank, message.prefix)
        return []

    def _lookup(self, now: float, sender: bytes, message: m.Lookup) -> Outgoing:
        return self._answers(self._notices.lookup(now, message))

    # -- addressing ---------------------------------------------------------------------------------------

    def _answers(self, answers: Sequence[m.StallAnswer | m.LagAnswer | m.Found]) -> Outgoing:
        return [(sender, answer) for answer in answers for sender in self._roster.senders_of([answer.rank])]

    def _to_all(self, message: m.Message) -> Outgoing:
        return [(sender, message) for sender in self._roster.alive_senders]
