"""Who is late, in the whole job: asks every node what it has counted, and puts it together by rank. Pure.

A node compares its own ranks by when they announced their inputs, and, for units that it owns, all inputs by when they
came: of other machines that is when their sum had arrived, so what was on the way counts too. Clocks of machines are
never compared.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from ..messages import LagAnswer, LagQuestion, LagReport, LagRow, RankLag
from ..roster import Roster
from .stalls import REPORT_TIMEOUT_S


@dataclass
class _Inquiry:
    deadline: float
    asker: LagQuestion
    reports: dict[int, LagReport] = field(default_factory=dict)


class LagQueries:
    """Open questions of ranks, by number."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._n_asked = 0
        self._open: dict[int, _Inquiry] = {}

    def ask(self, now: float, asker: LagQuestion) -> int:
        """Take a question; return the number under which all nodes are to report."""
        self._n_asked += 1
        self._open[self._n_asked] = _Inquiry(now + REPORT_TIMEOUT_S, asker)
        return self._n_asked

    def report(self, node: int, report: LagReport) -> list[LagAnswer]:
        """Take *node*'s report; return the answer if it was the last. Late reports are ignored."""
        inquiry = self._open.get(report.number)
        if inquiry is None:
            return []
        inquiry.reports[node] = report
        return [self._close(report.number)] if inquiry.reports.keys() >= set(self._roster.alive) else []

    def expire(self, now: float) -> list[LagAnswer]:
        """Return the answers to questions whose deadline has passed, from the nodes that have reported."""
        late = [number for number, inquiry in self._open.items() if now >= inquiry.deadline]
        return [self._close(number) for number in late]

    def _close(self, number: int) -> LagAnswer:
        inquiry = self._open.pop(number)
        silent = tuple(index for index in self._roster.alive if index not in inquiry.reports)
        return LagAnswer(rank=inquiry.asker.rank, question=inquiry.asker.question, silent_nodes=silent,
                         ranks=combined(inquiry.reports))


def combined(reports: dict[int, LagReport]) -> tuple[RankLag, ...]:
    """Return the lags of all ranks in *reports* (by node), in the order of ranks.

    An owner sees a rank of its own machine as it is. Of another machine it sees the sum, which is there once the last
    rank has pushed: a rank was early by as much as it is before the last one on its machine, in the mean; and that it
    was the last one, as often as it is on its machine.
    """
    seen: dict[int, list[LagRow]] = {}  # by node, at all owners
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
            here = own.get(row.rank, LagRow(rank=row.rank))
            early_ns = spread_ns - row.total_ns / row.count
            all_ns = here.total_ns + max(0.0, total_ns - count * early_ns)
            times_last = here.n_last + n_last * row.n_last / n_units
            n = here.count + count
            found.append(RankLag(rank=row.rank, count=n, mean_s=all_ns / n / 1e9 if n else 0.0,
                                 last_share=times_last / n if n else 0.0))
    return tuple(sorted(found, key=lambda each: each.rank))
