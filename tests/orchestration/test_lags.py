"""Who is late in the whole job: nodes are asked, and their counts put together by rank."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.job.rank_queries import REPORT_TIMEOUT_S, LagQueries, combined
from bpsfast.orchestration.messages import LagQuestion, LagReport, LagRow, NodeInfo
from bpsfast.orchestration.roster import Roster

S = 1_000_000_000


def local(rank, n, total_ns, n_last, last_total_ns):
    return LagRow(rank=rank, count=n, total_ns=total_ns, n_last=n_last, last_total_ns=last_total_ns)


def owned(n, total_ns, n_last, rank=-1, node=-1):
    return LagRow(rank=rank, node=node, count=n, total_ns=total_ns, n_last=n_last)


def test_a_machine_compares_its_own_ranks_exactly():
    """One node owns everything: what it sees of its ranks is the answer."""
    report = LagReport(number=1, local=(local(0, 10, 0, 0, 0), local(1, 10, 5 * S, 10, 5 * S)),
                       owned=(owned(10, 0, 0, rank=0), owned(10, 5 * S, 10, rank=1)))
    first, second = combined({0: report})
    assert (first.count, first.mean_s, first.last_share) == (10, 0.0, 0.0)
    assert (second.count, second.mean_s, second.last_share) == (10, 0.5, 1.0)


def test_a_sum_that_comes_late_is_the_last_ranks_and_the_others_are_early_by_what_they_were():
    """Two nodes of two ranks, six units owned by node 0, four by node 1; rank 3 is 0.2 s late in each."""
    ones = LagReport(number=1, local=(local(2, 10, 0, 0, 0), local(3, 10, 2 * S, 10, 2 * S)),
                     owned=(owned(4, 0, 0, rank=2), owned(4, 8 * S // 10, 4, rank=3), owned(4, 0, 0, node=0)))
    zeros = LagReport(number=1, local=(local(0, 10, 0, 0, 0), local(1, 10, 0, 10, 0)),
                      owned=(owned(6, 0, 0, rank=0), owned(6, 0, 0, rank=1), owned(6, 6 * 2 * S // 10, 6, node=1)))
    found = combined({0: zeros, 1: ones})
    assert [each.rank for each in found] == [0, 1, 2, 3] and {each.count for each in found} == {10}
    assert [each.mean_s for each in found] == pytest.approx([0.0, 0.0, 0.0, 0.2])
    assert [each.last_share for each in found] == pytest.approx([0.0, 0.0, 0.0, 1.0])


def test_helpers_own_and_ranks_that_pushed_nothing_are_left_out():
    helper = LagReport(number=1, local=(), owned=(owned(3, 0, 0, node=0), owned(3, 3 * S, 3, node=1)))
    zero = LagReport(number=1, local=(local(0, 3, 0, 3, 0),), owned=())
    one = LagReport(number=1, local=(local(1, 3, 0, 3, 0),), owned=())
    assert [(each.rank, each.mean_s, each.last_share) for each in combined({0: zero, 1: one, 2: helper})] == [
        (0, 0.0, 0.0), (1, 1.0, 1.0)]
    assert combined({0: LagReport(number=1, local=(), owned=())}) == ()


def test_every_asker_gets_an_answer_with_those_who_are_silent():
    nodes = [NodeInfo(index=i, host="h", pid=1, address="", shm_name="", ranks=(i,), nic_rate_bytes=0.0)
             for i in range(2)]
    lags = LagQueries(Roster([(b"%d" % node.index, node) for node in nodes]))
    one = lags.ask(0.0, LagQuestion(rank=0, question=5))
    two = lags.ask(1.0, LagQuestion(rank=1, question=6))
    nothing = {number: LagReport(number=number, local=(), owned=()) for number in (one, two, 99)}
    assert lags.report(0, nothing[one]) == [] == lags.report(0, nothing[two]) == lags.report(0, nothing[99])
    (answer,) = lags.report(1, nothing[two])
    assert (answer.rank, answer.question, answer.silent_nodes) == (1, 6, ())
    assert lags.expire(REPORT_TIMEOUT_S - 0.1) == []
    (answer,) = lags.expire(REPORT_TIMEOUT_S)
    assert (answer.rank, answer.question, answer.silent_nodes) == (0, 5, (1,))
    assert lags.report(1, nothing[one]) == []
