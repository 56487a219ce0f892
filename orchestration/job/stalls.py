"""Who is missing, and at which stage: asks every node about a partition that somebody waits for too long. Pure."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..messages import Stage, StallAnswer, Stalled, StallReport
from ..roster import Roster

#: Nodes answer within this time, or are named as silent: the asker has a deadline of its own.
REPORT_TIMEOUT_S = 1.5
#: Of the stages that nodes report, the earliest is what all wait for.
_STAGES: tuple[Stage, ...] = ("push", "partial", "sum", "result")
_ADVICE = ". Waiting on cannot help: all ranks must do the same pushes and barriers before they leave"


@dataclass
class _Inquiry:
    """One partition's round that is being asked about."""

    deadline: float
    askers: list[Stalled]
    reports: dict[int, StallReport] = field(default_factory=dict)


@dataclass(frozen=True)
class StallFinding:
    """What is known of a wait: the fields of a `StallAnswer`, `missing` without advice."""

    missing: str
    stage: Stage
    hopeless: bool = False
    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


class StallQueries:
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
        if not inquiry.reports.keys() >= set(self._roster.alive):
            return []
        return self._close(report.part, report.round)

    def expire(self, now: float) -> list[StallAnswer]:
        """Return the answers to inquiries whose deadline has passed, with those who did not report."""
        late = [key for key, inquiry in self._open.items() if now >= inquiry.deadline]
        return [answer for part, round_number in late for answer in self._close(part, round_number)]

    def _close(self, part: int, round_number: int) -> list[StallAnswer]:
        inquiry = self._open.pop((part, round_number))
        finding = self._find(inquiry.reports)
        return [self.answer(asker, finding) for asker in inquiry.askers]

    @staticmethod
    def answer(question: Stalled, finding: StallFinding) -> StallAnswer:
        """Return the answer to *question*, with what to do if it is hopeless."""
        return StallAnswer(rank=question.rank, question=question.question, stage=finding.stage,
                           hopeless=finding.hopeless, ranks=finding.ranks, nodes=finding.nodes,
                           missing=finding.missing + _ADVICE if finding.hopeless else finding.missing)

    def _find(self, reports: dict[int, StallReport]) -> StallFinding:
        describe = self._roster.describe_node
        stages = [report.stage for report in reports.values()]
        stage: Stage = next((each for each in _STAGES if each in stages), "done")
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
        return StallFinding(missing="missing: " + "; ".join(texts) if texts else f"nobody is missing: {nobody}", stage=stage,
                       hopeless=any(report.gone_ranks for report in reports.values()), ranks=tuple(sorted(ranks)),
                       nodes=tuple(sorted({*blamed, *silent})))

    def rank_is_missing(self, rank: int, verb: str) -> str:
        """Say that *rank* "has not pushed", or that it never will because it has left."""
        return f"{self._roster.describe_rank(rank)}: " + ("has called shutdown" if self._left(rank) else verb)

    def without(self, ranks: Iterable[int], stage: Stage, verb: str) -> StallFinding:
        """Return that *ranks* are missing from something; it is hopeless if one of them has left."""
        ranks = tuple(ranks)
        return StallFinding("missing: " + "; ".join(self.rank_is_missing(rank, verb) for rank in ranks), stage,
                       any(map(self._left, ranks)), ranks)
