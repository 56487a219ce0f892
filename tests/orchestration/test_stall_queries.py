"""Inquiries: asked once, answered to everybody who asked, with a deadline."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.job.rank_queries import REPORT_TIMEOUT_S, StallQueries
from bpsfast.orchestration.messages import NodeInfo, StallQuestion, StallReport
from bpsfast.orchestration.roster import Roster

LEFT = {1}


@pytest.fixture
def stalls():
    ranks = [(0,), (1, 2), ()]
    nodes = [NodeInfo(index=i, host="abc"[i], pid=1, address="", shm_name="", ranks=ranks[i], nic_rate_bytes=0.0)
             for i in range(3)]
    return StallQueries(Roster([(b"%d" % node.index, node) for node in nodes]), LEFT.__contains__)


def asked(rank, part=7, round_number=2):
    return StallQuestion(rank=rank, question=7, part=part, round=round_number, name="w")


def report(part=7, ranks=(), nodes=(), gone=(), stage=None):
    stage = stage or ("push" if ranks else "partial" if nodes else "done")
    return StallReport(part=part, round=2, stage=stage, missing_ranks=ranks, missing_nodes=nodes, gone_ranks=gone)


def test_nodes_are_asked_once_and_all_askers_answered(stalls):
    assert stalls.ask(0.0, asked(0)) and not stalls.ask(0.1, asked(2))
    assert stalls.report(0, report()) == [] == stalls.report(0, report()) == stalls.report(1, report(ranks=(2,)))
    answers = stalls.report(2, report())
    assert [answer.rank for answer in answers] == [0, 2]
    assert {answer.missing for answer in answers} == {"missing: rank 2 (node 1, host b): has not pushed"}
    assert stalls.report(2, report()) == [] == stalls.expire(100.0)
    assert stalls.ask(0.2, asked(0))


def test_inquiries_do_not_mix(stalls):
    stalls.ask(0.0, asked(0))
    stalls.ask(1.0, asked(0, part=8))
    for node in range(3):
        stalls.report(node, report(part=8, ranks=(1,)) if node == 1 else report(part=7))
    (seven,) = stalls.expire(REPORT_TIMEOUT_S)
    assert (seven.question, seven.missing) == (7, "missing: node 1 (host b, ranks 1, 2): does not answer")
    (eight,) = stalls.expire(1.0 + REPORT_TIMEOUT_S)
    assert eight.missing.startswith("missing: rank 1 (node 1, host b): has called shutdown; node 0")


def test_a_node_that_waits_for_its_ranks_is_not_blamed(stalls):
    stalls.ask(0.0, asked(0))
    stalls.report(0, report(nodes=(1, 2)))
    stalls.report(1, report(ranks=(2,)))
    (answer,) = stalls.report(2, report(nodes=(1,)))
    assert answer.missing == ("missing: rank 2 (node 1, host b): has not pushed; "
                              "helper 0 (node 2, host c): its partial sum has not arrived at node 0")
    assert (answer.stage, answer.ranks, answer.nodes) == ("push", (2,), (2,))


@pytest.mark.parametrize(("gone", "hopeless"), [((1,), True), ((), False)])
def test_only_the_nodes_word_makes_a_wait_hopeless(stalls, gone, hopeless):
    stalls.ask(0.0, asked(0))
    stalls.report(0, report(nodes=(1,)))
    stalls.report(1, report(ranks=(1,), gone=gone))  # it may have left after its node looked
    (answer,) = stalls.report(2, report())
    assert answer.hopeless is hopeless
    assert answer.missing.startswith("missing: rank 1 (node 1, host b): has called shutdown")
    assert ("Waiting on cannot help" in answer.missing) is hopeless


@pytest.mark.parametrize(("reports", "stage", "nodes", "words"), [
    ([("partial", (1,)), ("result", (0,)), ("done", ())], "partial", (1,),
     "missing: node 1 (host b, ranks 1, 2): its partial sum has not arrived at node 0"),
    ([("sum", ()), ("result", (0,)), ("done", ())], "sum", (),
     "nobody is missing: all have pushed, the sum is still to be made"),
    ([("done", ()), ("result", (0,)), ("done", ())], "result", (0,),
     "missing: node 0 (host a, rank 0): its result has not arrived at node 1"),
    ([("result", (2,)), ("result", (2,)), ("done", ())], "result", (2,),
     "missing: helper 0 (node 2, host c): its result has not arrived at node 0, 1"),
    ([("done", ())] * 3, "done", (), "nobody is missing: all have pushed"),
])
def test_stages(stalls, reports, stage, nodes, words):
    stalls.ask(0.0, asked(0))
    for node, (own, missing) in enumerate(reports):
        answers = stalls.report(node, report(nodes=missing, stage=own))
    assert [(each.stage, each.ranks, each.nodes, each.missing) for each in answers] == [(stage, (), nodes, words)]


def test_a_silent_owner_is_to_blame_and_its_stage_unknown_unless_others_know(stalls):
    stalls.ask(0.0, asked(0))
    stalls.report(0, report(stage="done"))
    stalls.report(2, report(stage="done"))
    (answer,) = stalls.expire(REPORT_TIMEOUT_S)
    assert (answer.stage, answer.nodes) == ("unknown", (1,))
    stalls.ask(5.0, asked(0))
    stalls.report(0, report(nodes=(1,), stage="result"))
    stalls.report(2, report(stage="done"))
    (answer,) = stalls.expire(5.0 + REPORT_TIMEOUT_S)
    assert (answer.stage, answer.nodes) == ("result", (1,))
    assert answer.missing == "missing: node 1 (host b, ranks 1, 2): does not answer"
