"""Who is missing, in words: asks every node about a partition that somebody waits for too long. Pure."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .messages import StallAnswer, Stalled, StallReport
from .roster import Roster

#: Nodes answer within this time, or are named as silent: the asker has a deadline of its own.
REPORT_TIMEOUT_S = 1.5
_ADVICE = ". Waiting on cannot help: all ranks must do the same pushes and barriers before they leave"


@dataclass
class _Inquiry:
    """One partition's round that is being asked about."""

    deadline: float
    askers: list[Stalled]
    reports: dict[int, StallReport] = field(default_factory=dict)


class Stalls:
    """Open inquiries, by (part, round). `left(rank)` tells who has called shutdown."""

    def __init__(self, roster: Roster, left: Callable[[int], bool]) -> None:
        self._roster = roster
        self._left = left
        self._open: dict[tuple[int, int], _Inquiry] = {}

    def ask(self, now: float, question: Stalled) -> bool:
        """Take *question*; tell whether the nodes have to be asked (they are not asked twice at a time)."""
        inquiry = self._open.get((question.part, question.round))
        if inquiry is not None:
            inquiry.askers.append(question)
            return False
        self._open[question.part, question.round] = _Inquiry(now + REPORT_TIMEOUT_S, [question])
        return True

    def report(self, node: int, report: StallReport) -> list[StallAnswer]:
        """Take *node*'s report; return the answers if it was the last. Late reports are ignored."""
        inquiry = self._open.get((report.part, report.round))
        if inquiry is None:
            return []
        inquiry.reports[node] = report
        if len(inquiry.reports) < len(self._roster.nodes):
            return []
        return self._close(report.part, report.round)

    def expire(self, now: float) -> list[StallAnswer]:
        """Return the answers to inquiries whose deadline has passed, with those who did not report."""
        late = [key for key, inquiry in self._open.items() if now >= inquiry.deadline]
        return [answer for part, round_number in late for answer in self._close(part, round_number)]

    def _close(self, part: int, round_number: int) -> list[StallAnswer]:
        inquiry = self._open.pop((part, round_number))
        words = self._words(inquiry)
        hopeless = any(report.gone_ranks for report in inquiry.reports.values())
        return [self.answer(asker, words, hopeless) for asker in inquiry.askers]

    @staticmethod
    def answer(question: Stalled, words: str, hopeless: bool) -> StallAnswer:
        """Return the answer to *question*, with what to do if it is *hopeless*."""
        return StallAnswer(rank=question.rank, question=question.question, hopeless=hopeless,
                           missing=words + _ADVICE if hopeless else words)

    def _words(self, inquiry: _Inquiry) -> str:
        ranks = {rank for report in inquiry.reports.values() for rank in report.missing_ranks}
        nodes = {node for report in inquiry.reports.values() for node in report.missing_nodes}
        silent = [node for node in range(len(self._roster.nodes)) if node not in inquiry.reports]
        texts = [self.rank_is_missing(rank, "has not pushed") for rank in sorted(ranks)]
        # A node that waits for its own ranks is not to blame for what it cannot send yet.
        waiting = {self._roster.node_of(rank) for rank in ranks} | set(silent)
        texts += [f"{self._roster.describe_node(node)}: its data has not arrived" for node in sorted(nodes - waiting)]
        texts += [f"{self._roster.describe_node(node)}: does not answer" for node in silent]
        return "missing: " + "; ".join(texts) if texts else "nobody is missing: all have pushed"

    def rank_is_missing(self, rank: int, verb: str) -> str:
        """Say that *rank* "has not pushed", or that it never will because it has left."""
        return f"{self._roster.describe_rank(rank)}: " + ("has called shutdown" if self._left(rank) else verb)

    def words(self, ranks: Iterable[int], verb: str) -> tuple[str, bool]:
        """Say which *ranks* are missing from something, and whether one of them has left."""
        ranks = list(ranks)
        return ("missing: " + "; ".join(self.rank_is_missing(rank, verb) for rank in ranks),
                any(map(self._left, ranks)))
