"""The scheduler's decisions in trouble: losses, silence, nonsense, and the question who is missing."""
from __future__ import annotations

import pytest

from bpsfast.orchestration import messages as m
from tests.support.job_table import ALL, Table, committed, join, spec, welcomed

# -- trouble ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("who", "words"), [
    ("rank 3", "rank 3 (node 1, host b) is lost: killed (seen by node 0 (host a, ranks 0, 1))"),
    ("node 1", "node 1 (host b, ranks 2, 3) is lost: killed"),
    ("rank 77", "rank 77 is lost"), ("a server", "a server is lost"),
])
def test_a_loss_is_told_to_everybody(who, words):
    table = welcomed()
    table.say(b"A", m.Lost(who=who, reason="killed"))
    assert table.job.aborted.error == "PeerLostError" and words in table.job.aborted.reason
    assert all(table.got(sender, m.Abort) == [table.job.aborted] for sender in ALL)
    table.say(b"B", m.Lost(who="rank 0", reason="x"), m.Ready(generation=1), m.BarrierEnter(rank=2, sequence=1))
    assert not table.got(b"B", m.Abort)


def test_a_loss_before_the_welcome_counts():
    table = Table()
    table.say(b"A", join("a"), m.Lost(who="local rank 1", reason="exited with 1"))
    assert table.job.aborted.reason == (
        "local rank 1 is lost: exited with 1 (seen by the node on host a (pid 1, 1 ranks))")


def test_a_silent_node_is_lost_after_its_lease():
    table = welcomed()
    for now in range(1, 10):
        table.tick(float(now))
        table.say(b"A", m.Heartbeat(sequence=now))
        table.say(b"H", m.Heartbeat(sequence=now))
    assert not table.job.over
    table.tick(10.0)
    assert table.job.aborted.error == "PeerLostError"
    assert table.job.aborted.reason == (
        "node 1 (host b, ranks 2, 3) has been silent for 10.0 s (lease_s = 10)")


def test_a_scheduler_that_slept_blames_nobody():
    table = welcomed()
    table.tick(1000.0)
    assert not table.job.over
    for now in range(1001, 1010):
        table.tick(float(now))
    table.say(b"A", m.Heartbeat(sequence=1))
    table.tick(1010.0)
    assert table.job.aborted.error == "PeerLostError" and "node 1" in table.job.aborted.reason


def test_a_scheduler_that_hears_no_majority_decides_nothing():
    table = welcomed()
    for now in range(1, 11):
        table.tick(float(now))
        table.say(b"H", m.Heartbeat(sequence=now))
    assert table.job.has_no_majority and not table.job.over and not table.got(b"H", m.Abort)


@pytest.mark.parametrize("alone", [b"A", b"B"])
def test_of_two_halves_that_with_the_first_node_decides(alone):
    table = welcomed()
    for now in range(1, 11):
        table.tick(float(now))
        table.say(alone, m.Heartbeat(sequence=now))
    assert (table.job.aborted is None) == table.job.has_no_majority == (alone == b"B")


def test_heartbeats_go_to_everybody():
    table = welcomed()
    for now in (0.5, 1.0, 1.5, 2.5):
        table.tick(now)
    assert table.got(b"H", m.Heartbeat) == [m.Heartbeat(sequence=1), m.Heartbeat(sequence=2)]


def test_an_unreachable_node_is_lost():
    table = welcomed()
    table.post(table.job.unreachable(1.0, b"Z"))
    assert not table.job.over
    table.post(table.job.unreachable(1.0, b"B"))
    assert "node 1 (host b, ranks 2, 3) closed its connection" in table.job.aborted.reason


@pytest.mark.parametrize(("message", "words"), [
    (m.Declare(rank=2, tensors=()), "node 0 (host a, ranks 0, 1) sent Declare for rank 2, which is not its own"),
    (m.BarrierEnter(rank=9, sequence=1), "sent BarrierEnter for rank 9"),
    (join("a", 2), "joined twice"),
])
def test_nonsense_from_a_node_ends_the_job(message, words):
    table = welcomed()
    table.say(b"A", message)
    assert table.job.aborted.error == "ProtocolError" and words in table.job.aborted.reason


def test_nothing_but_joins_before_the_welcome():
    table = Table()
    table.say(b"A", join("a"), m.Ready(generation=1))
    assert "sent Ready before all had joined" in table.job.aborted.reason


# -- who is missing? --------------------------------------------------------------------------------------

def stalled(rank=0, part=0, name="a"):
    return m.StallQuestion(rank=rank, question=3, part=part, round=5 if part >= 0 else -1, name=name)


def report(ranks=(), nodes=(), part=0):
    return m.StallReport(part=part, round=5, stage="push" if ranks else "partial" if nodes else "done",
                         missing_ranks=ranks, missing_nodes=nodes)


def test_reports_become_words():
    table = committed("a")
    table.say(b"B", m.RankLeft(rank=2))
    table.say(b"A", stalled(rank=0), stalled(rank=1))
    assert all(table.got(sender, m.StallReportRequest) == [m.StallReportRequest(part=0, round=5)] for sender in ALL)
    table.say(b"A", report(nodes=(1,)))
    table.say(b"H", report(nodes=(1,)))
    assert not table.got(b"A", m.StallAnswer)
    table.say(b"B", report(ranks=(3, 2)))
    answers = table.got(b"A", m.StallAnswer)
    assert [(answer.rank, answer.question) for answer in answers] == [(0, 3), (1, 3)]
    assert {answer.missing for answer in answers} == {
        "missing: rank 2 (node 1, host b): has called shutdown; rank 3 (node 1, host b): has not pushed"}


def test_who_does_not_report_is_named():
    table = committed("a")
    table.say(b"A", stalled())
    table.say(b"A", report(nodes=(2,)))
    table.say(b"B", report())
    table.tick(1.4)
    assert not table.got(b"A", m.StallAnswer)
    table.tick(1.5)
    (answer,) = table.got(b"A", m.StallAnswer)
    assert answer.missing == "missing: helper 0 (node 2, host h): does not answer"
    table.say(b"H", report())
    assert not table.got(b"A", m.StallAnswer)


@pytest.mark.parametrize(("reports", "words"), [
    ({b"A": ((), (1,)), b"B": ((), ()), b"H": ((), ())},
     "missing: node 1 (host b, ranks 2, 3): its partial sum has not arrived at node 0"),
    ({b"A": ((), ()), b"B": ((), ()), b"H": ((), ())}, "nobody is missing: all have pushed"),
])
def test_words_without_missing_ranks(reports, words):
    table = committed("a")
    table.say(b"A", stalled())
    for sender, (ranks, nodes) in reports.items():
        table.say(sender, report(ranks, nodes))
    assert table.got(b"A", m.StallAnswer)[0].missing == words


def test_who_has_not_declared():
    table = welcomed()
    table.say(b"A", m.Declare(rank=0, tensors=(spec("a"),)), stalled(part=-1))
    (answer,) = table.got(b"A", m.StallAnswer)
    assert (answer.rank, answer.question) == (0, 3)
    assert answer.missing.startswith("missing: rank 1 (node 0, host a): has not declared 'a'; rank 2 (node 1, host b)")
    assert not table.got(b"B", m.StallReportRequest)


def test_who_is_still_preparing():
    table = welcomed()
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=(spec("a"),)) for rank in ranks))
    for sender in (b"A", b"H"):
        table.say(sender, m.Ready(generation=1))
    table.say(b"A", stalled(part=-1))
    assert table.got(b"A", m.StallAnswer)[0].missing == (
        "missing: node 1 (host b, ranks 2, 3): is still preparing memory for 'a'")
    table.say(b"B", m.Ready(generation=1))
    table.say(b"A", stalled(part=-1))
    assert table.got(b"A", m.StallAnswer)[0].missing == "nobody is missing: all ranks have declared 'a'"


def test_a_failed_declaration_is_the_answer():
    table = welcomed()
    table.say(b"A", m.Declare(rank=0, tensors=(spec("a", dtype="uint16"),)), stalled(part=-1))
    assert "the declaration failed: tensor 'a' has dtype 'uint16'" in table.got(b"A", m.StallAnswer)[0].missing


def test_who_has_not_entered_the_barrier():
    table = welcomed()
    table.say(b"A", m.BarrierEnter(rank=0, sequence=3), m.BarrierEnter(rank=1, sequence=3))
    table.say(b"B", m.RankLeft(rank=2))
    table.say(b"A", stalled(part=-1, name="barrier:3"))
    (answer,) = table.got(b"A", m.StallAnswer)
    assert answer.hopeless and answer.missing.startswith(
        "missing: rank 2 (node 1, host b): has called shutdown; rank 3 (node 1, host b): has not entered the barrier")


def test_the_first_departure_is_told_to_everybody():
    table = welcomed()
    table.say(b"B", m.RankLeft(rank=2), m.RankLeft(rank=3))
    assert all(table.got(sender, m.FirstRankLeft) == [m.FirstRankLeft(rank=2)] for sender in ALL)


def test_a_declaration_waits_in_vain_only_for_who_has_left_without_it():
    table = welcomed()
    table.say(b"A", *(m.Declare(rank=rank, tensors=(spec("a"),)) for rank in (0, 1)))
    table.say(b"B", m.Declare(rank=2, tensors=(spec("a"),)), m.RankLeft(rank=2))
    table.say(b"A", stalled(part=-1))
    (answer,) = table.got(b"A", m.StallAnswer)
    assert not answer.hopeless and answer.missing == "missing: rank 3 (node 1, host b): has not declared 'a'"
    table.say(b"B", m.RankLeft(rank=3))
    table.say(b"A", stalled(part=-1))
    (answer,) = table.got(b"A", m.StallAnswer)
    assert answer.hopeless and "rank 3 (node 1, host b): has called shutdown" in answer.missing
