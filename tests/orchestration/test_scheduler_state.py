"""A scheduler's time: a job that is new, one that another scheduler began, and whatever was missed in between."""
from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.errors import ProtocolError
from bpsfast.orchestration.failover.control_log import ControlLog
from bpsfast.orchestration.failover.scheduler_state import SchedulerState
from bpsfast.orchestration.job.generations import Generations
from tests.support.job_table import join, spec
from tests.support.scheduler_with_nodes import NODES, RANKS, Court, court as court


def test_another_scheduler_goes_on_when_all_have_told_it(court):
    court.declare(spec("x"), only="AB")
    court.lose_scheduler("A", "B", "C")
    assert not any(court.inbox.values()), "nothing is decided before all have spoken"
    court.dial("H")
    assert all(court.kinds(name) == [m.Resume] for name in NODES)
    assert court.scheduler_state.job.name == "this job"
    court.read(*NODES)
    court.declare(spec("x"), only="C")
    (plan,) = court.got("A", m.Plan)
    assert [unit.name for unit in plan.units] == ["x"] and plan.units[0].unit == 1 and plan.units[0].parts[0].part == 1
    assert plan.generation > 1 and plan.units[0].priority == -1, "it is the second that was declared"


@pytest.mark.parametrize("n_read", range(4))
def test_of_two_connections_of_one_node_the_later_counts(court, n_read):
    """H gives up one that was not answered in time; *n_read* of its messages are read before the later one's."""
    report = [m.Heartbeat(sequence=1), *court.control_logs["H"].report()]
    court.hang_up("H")
    earlier, later = court.hang_up("H"), court.over["H"]
    court.dial("B")
    court.read("A")

    def receive(sender, *messages):
        for message in messages:
            court.post(court.scheduler_state.receive(court.now, sender, message))

    receive(earlier, *report[:n_read])
    receive(later, *report)
    receive(earlier, *report[n_read:])
    court.read("C")  # all have told
    court.post(court.scheduler_state.unreachable(court.now, earlier))
    assert court.kinds("H") == [m.Resume] and not court.scheduler_state.job.roster.lost and not court.got("A", m.Freeze)


def test_a_commit_that_one_has_read_is_everybodys(court):
    court.declare(spec("x"))
    court.read(*NODES)  # the plan
    commit = court.read("B")["B"]
    assert [type(message) for message in commit] == [m.Commit]
    court.lose_scheduler()
    assert court.kinds("B") == [m.Resume] and all(court.kinds(name) == [m.Commit, m.Resume] for name in "ACH")
    assert court.got("A", m.Commit) == commit
    court.read(*NODES)
    told = {tuple(unit.unit for kept in control_log.report()
                  if isinstance(kept, m.CommittedUnits) for unit in kept.units)
            for control_log in court.control_logs.values()}
    assert len(told) == 1


def test_a_plan_that_nobody_has_committed_is_dropped_and_proposed_anew(court):
    court.declare(spec("x"))
    court.read("A", "B")
    court.lose_scheduler()
    assert all(court.kinds(name) == [m.Resume, m.Plan] for name in NODES)
    assert court.got("A", m.Plan)[0].generation > 2, "no late word about the old one is taken for one about it"
    court.say("A", m.Ready(generation=2))
    court.read(*NODES)
    assert all(court.kinds(name) == [m.Commit] for name in NODES)


def test_units_that_one_has_given_back_are_given_back_by_all(court):
    for name, ranks in RANKS.items():
        court.say(name, *(m.Retire(rank=rank, units=(0,)) for rank in ranks))
    assert [type(message) for message in court.read("C")["C"]] == [m.Retired]
    court.lose_scheduler()
    assert court.kinds("C") == [m.Resume] and court.kinds("A") == [m.Retired, m.Resume]
    assert not court.scheduler_state.over
    court.read(*NODES)
    court.declare(spec("w"))
    assert court.got("A", m.Plan), "the name is free again"


def test_what_others_have_given_back_is_so_by_who_has_missed_its_commit_too(court):
    court.declare(spec("x"))
    court.read(*NODES)
    court.read("A", "B", "C")  # H has prepared for the plan, and is not told of its commit
    for name in "ABC":
        court.say(name, *(m.Retire(rank=rank, units=(1,)) for rank in RANKS[name]))
    court.read("A", "B", "C")
    court.lose_scheduler()
    assert court.kinds("H") == [m.Commit, m.Retired, m.Resume] and court.got("H", m.Retired)[0].units == (1,)
    assert court.kinds("A") == [m.Resume]


def test_what_several_have_seen_of_a_store_is_put_together(court):
    told = {"A": ((7, (0, 1)),), "B": ((7, (2,)),), "C": ()}
    for name, gone in told.items():
        report = court.control_logs[name].report
        court.control_logs[name].report = lambda *number, report=report, gone=gone: [
            msgspec.structs.replace(each, gone_from=gone) if isinstance(each, m.Rejoin) else each
            for each in report(*number)]
    seen = {}
    resume = Generations.resume
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generations, "resume", lambda self, past: (seen.update(past.gone_from), resume(self, past))[1])
        court.lose_scheduler()
    assert seen == {7: (0, 1, 2)}


def test_a_barrier_that_one_has_left_is_done(court):
    for name, ranks in RANKS.items():
        court.say(name, *(m.BarrierEnter(rank=rank, sequence=1) for rank in ranks))
    court.read("A")
    court.say("A", m.BarrierEnter(rank=0, sequence=2))
    court.lose_scheduler()
    assert court.kinds("A") == [m.Resume] and court.got("B", m.BarrierDone) == [m.BarrierDone(sequence=1)]
    for name, rank in (("A", 1), ("B", 2), ("B", 3), ("C", 4)):
        court.say(name, m.BarrierEnter(rank=rank, sequence=2))
    assert court.got("A", m.BarrierDone) == [m.BarrierDone(sequence=2)]


def test_a_recovery_that_was_under_way_begins_anew_in_a_higher_epoch(court):
    court.post(court.scheduler_state.job.unreachable(court.now, court.over["H"]))
    assert [type(message) for message in court.read("A")["A"]] == [m.Freeze]
    court.lose_scheduler("A", "B", "C")
    for name in "ABC":
        assert court.kinds(name) == [m.Resume, m.Freeze]
        assert court.got(name, m.Freeze)[0].epoch == 3 and court.got(name, m.Freeze)[0].lost == (3,)


def test_a_helper_that_does_not_come_back_is_lost_and_a_node_with_ranks_ends_the_job(court):
    court.lose_scheduler("A", "B", "C")
    court.tick(9.0, "ABC")
    assert not court.kinds("A")
    court.tick(10.0, "ABC")
    assert court.kinds("A") == [m.Resume, m.Freeze]
    court.dial("H")
    assert court.kinds("H") == [m.Abort] and court.got("H", m.Abort)[0].goes_on
    court.lose_scheduler("A", "B", "H")
    court.tick(20.0, "ABH")
    assert court.scheduler_state.job.aborted.error == "PeerLostError"
    assert "node 2 (host c, rank 4) did not come back within lease_s = 10 s" in court.got("A", m.Abort)[0].reason


def test_a_helper_that_a_worker_has_seen_go_is_not_waited_for(court):
    court.say("B", m.Lost(who="node 3", reason="its connection ended"))
    court.lose_scheduler("A", "B", "C")
    assert court.kinds("A") == [m.Resume, m.Freeze]


def test_without_a_majority_nothing_is_decided_until_the_deadline(court):
    court.lose_scheduler("A", "H")
    court.tick(59.0, "AH")
    assert not court.kinds("A") and not court.scheduler_state.over
    court.tick(60.0, "AH")
    assert court.scheduler_state.job.aborted.error == "StallError"
    assert "missing node 1 (host b, ranks 2, 3); node 2 (host c, rank 4)" in court.got("A", m.Abort)[0].reason


def test_a_node_that_was_cut_off_has_everybody_say_all_again(court):
    court.declare(spec("x"))
    court.read(*NODES)
    court.inbox[court.over["A"]].clear()  # its commit is lost
    cut_off = court.over["A"]
    court.dial("A")
    court.scheduler_state.unreachable(court.now, cut_off)
    assert all(court.kinds(name) == [m.Commit, m.RejoinRequest] for name in "BCH")
    court.read("B", "C", "H")
    assert court.kinds("A") == [m.Commit, m.Resume] and court.kinds("B") == [m.Resume]
    court.tick(5.0, NODES)
    assert not court.scheduler_state.over


def test_who_has_closed_its_connection_has_the_lease_to_come_back(court):
    assert not court.scheduler_state.unreachable(court.now, court.over["C"])
    court.tick(9.5, "ABH")
    assert not court.scheduler_state.over
    court.dial("C")
    court.read(*"ABCH")
    assert all(court.kinds(name)[-1] is m.Resume for name in NODES) and not court.scheduler_state.over


def test_who_has_closed_its_connection_and_does_not_come_back_within_the_lease_is_lost(court):
    court.scheduler_state.unreachable(court.now, court.over["C"])
    court.tick(9.5, "ABH")
    assert not court.scheduler_state.over
    court.tick(10.0, "ABH")
    assert court.scheduler_state.job.aborted.error == "PeerLostError"
    reason = court.scheduler_state.job.aborted.reason
    assert "node 2 (host c, rank 4) has been silent for 10.0 s (lease_s = 10)" in reason


def test_a_process_is_dead_whose_connection_is_closed_and_whose_port_refuses(court):
    court.tick(0.5, NODES)
    court.scheduler_state.unreachable(court.now, court.over["C"])
    court.tick(1.0, "ABH")
    assert court.got("A", m.ProbeRequest) == [m.ProbeRequest(node=2)]
    court.say("A", m.ProbeResult(node=2, outcome="refused"))
    court.tick(1.5, "ABH")
    court.say("B", m.ProbeResult(node=2, outcome="refused"))
    assert not court.scheduler_state.over, "a firewall that is just reloaded does both"
    court.tick(2.0, "ABH")
    assert court.scheduler_state.job.aborted.error == "PeerLostError"
    assert "closed its connection" in court.scheduler_state.job.aborted.reason


def test_who_answers_now_and_then_is_not_dead(court):
    court.scheduler_state.unreachable(court.now, court.over["C"])
    for now in range(1, 10):
        court.say("A", m.ProbeResult(node=2, outcome="refused"), m.ProbeResult(node=2, outcome="answers"))
        court.tick(float(now), "ABH")
    assert not court.scheduler_state.over


def test_who_refuses_while_the_scheduler_hears_it_is_not_dead(court):
    for now in range(1, 30):
        court.say("A", m.ProbeResult(node=2, outcome="refused"), m.ProbeResult(node=3, outcome="refused"))
        court.tick(float(now), NODES)
    assert not court.scheduler_state.over and not court.got("A", m.Freeze)
    assert len(court.got("C", m.Heartbeat)) > 50, "each time its connection is tried"


def test_a_helper_is_dead_as_soon_as_both_signs_are_there(court):
    court.say("B", m.ProbeResult(node=3, outcome="refused"))
    assert not court.got("A", m.Freeze)
    court.post(court.scheduler_state.unreachable(court.now, court.over["H"]))
    assert [freeze.lost for freeze in court.got("A", m.Freeze)] == [(3,)]


def test_a_helper_that_is_only_cut_off_comes_back_within_the_lease(court):
    court.scheduler_state.unreachable(court.now, court.over["H"])
    court.tick(9.5, "ABC")
    court.dial("H")
    court.read(*"ABC")
    assert court.kinds("H") == [m.Resume] and not court.got("A", m.Freeze)


def visits(court, to, names, outcome="answers"):
    """Let the time pass for *names*, who answer each `ProbeRequest` by *outcome*."""
    while court.now < to:
        court.tick(court.now + 0.5, names)
        for name in names:
            for visit in court.got(name, m.ProbeRequest):
                court.inbox[court.over[name]].remove(visit)
                court.say(name, m.ProbeResult(node=visit.node, outcome=outcome))


def test_who_is_cut_off_from_the_scheduler_alone_has_as_long_as_all_have_when_it_is_lost(court):
    visits(court, 59.5, "ABH")
    assert not court.scheduler_state.over
    assert ["has been silent for 10.0 s (lease_s = 10), but other nodes reach it" in remark
            for remark in court.scheduler_state.take_remarks()] == [True]
    visits(court, 60.0, "ABH")
    assert "node 2 (host c, rank 4) has been silent for 60.0 s" in court.scheduler_state.job.aborted.reason


def test_who_is_cut_off_from_the_scheduler_alone_comes_back(court):
    visits(court, 40.0, "ABH")
    court.dial("C")
    court.read(*"ABH")
    assert all(court.kinds(name)[-1] is m.Resume for name in NODES) and not court.scheduler_state.over


@pytest.mark.parametrize("outcome", ["silent", "refused"])
def test_the_lease_counts_from_the_last_sign_of_life_from_anyone(court, outcome):
    visits(court, 20.0, "ABH")
    visits(court, 29.0, "ABH", outcome)
    assert not court.scheduler_state.over
    visits(court, 30.0, "ABH", outcome)
    aborted = court.scheduler_state.job.aborted
    assert aborted.error == "PeerLostError" and "node 2" in aborted.reason


def test_a_scheduler_that_hears_no_majority_decides_nothing_whoever_is_vouched_for(court):
    visits(court, 10.0, "CH")
    assert not court.scheduler_state.over and court.got("C", m.RejoinRequest)


def test_another_scheduler_has_those_visited_that_it_does_not_hear(court):
    court.lose_scheduler("A", "B", "H")
    visits(court, 59.0, "ABH")
    assert not court.scheduler_state.over and not court.got("A", m.Resume)
    court.dial("C")
    assert court.kinds("A")[-1] is m.Resume and not court.scheduler_state.over


def test_another_scheduler_does_not_wait_for_a_helper_that_refuses(court):
    court.lose_scheduler("A", "B", "C")
    court.say("B", m.ProbeResult(node=3, outcome="refused"))
    assert court.kinds("A") == [m.Resume, m.Freeze]


@pytest.mark.parametrize(("who", "freezes", "ends"), [("H", True, False), ("C", False, True), ("Z", False, False)])
def test_what_cannot_be_read_while_a_job_is_rebuilt_costs_as_much_as_at_any_time(court, who, freezes, ends):
    court.lose_scheduler("A", "C", "H")
    sender = court.over.get(who, b"Z")
    court.post(court.scheduler_state.unreadable(court.now, sender, ProtocolError("7 bytes")))
    court.dial("B")
    assert bool(court.got("A", m.Freeze)) == freezes and court.scheduler_state.over == ends
    said = court.inbox[sender][0]
    assert isinstance(said, m.Refuse) if who == "Z" else "cannot be read: 7 bytes" in said.reason


@pytest.mark.parametrize("states", ["running", "rebuilding", "over"])
def test_a_rejoin_or_join_of_another_version_recalls_nobody(court, states):
    report = next(court.control_logs["A"].report())
    if states == "rebuilding":
        court.lose_scheduler("A", "B")
    if states == "over":
        court.post(court.scheduler_state.abort(ProtocolError("over")))
    for sender, message in ((b"Y", msgspec.structs.replace(report, version=1, index=1)),
                            (b"X", join("x", 1, version=1))):
        court.post(court.scheduler_state.receive(court.now, sender, message))
        assert [type(said) for said in court.inbox[sender]] == [m.Abort if states == "over" else m.Refuse]
    assert not court.got("B", m.RejoinRequest)


def test_a_scheduler_that_hears_no_majority_waits_for_one(court):
    court.tick(10.0, "AH")
    assert not court.scheduler_state.over and court.got("A", m.RejoinRequest)
    court.read("A", "H")
    court.tick(20.0, "AH")
    assert not court.scheduler_state.over
    court.dial("B", "C")
    assert all(court.kinds(name)[-1] is m.Resume for name in NODES)


def test_nodes_that_were_never_welcomed_are_known_by_their_address(court):
    fresh = Court()
    fresh.control_logs["C"] = ControlLog("1.0", {"transport": "tcp"})
    fresh.scheduler_state, fresh.inbox = SchedulerState(fresh.settings, 0.0), defaultdict(list)
    fresh.post(fresh.scheduler_state.receive(0.0, fresh.over["C"], join("c", 1)))
    fresh.dial("A", "B", "H")
    assert fresh.kinds("A") == [m.Resume] and fresh.kinds("C") == [m.Welcome, m.Resume]
    assert fresh.got("C", m.Welcome)[0].index == 2 and fresh.got("C", m.Welcome)[0].job == "this job"


def test_nodes_of_another_job_are_refused(court):
    stranger = next(court.control_logs["A"].report())
    court.post(court.scheduler_state.receive(0.0, b"Z", msgspec.structs.replace(stranger, job="another")))
    assert [message.error for message in court.inbox[b"Z"]] == ["PeerLostError"]
    assert not court.kinds("A")
    court.lose_scheduler("A")
    court.post(court.scheduler_state.receive(0.0, b"Y", msgspec.structs.replace(stranger, job="another", index=1)))
    court.post(court.scheduler_state.receive(0.0, b"X", msgspec.structs.replace(stranger, version=1, index=1)))
    assert [message.error for message in (*court.inbox[b"Y"], *court.inbox[b"X"])] == ["PeerLostError", "MismatchError"]
    court.dial("B", "C", "H")
    assert court.kinds("A") == [m.Resume]


def test_a_job_whose_ranks_have_all_left_is_finished_by_the_next_scheduler(court):
    for name in "AB":
        court.say(name, *(m.RankLeft(rank=rank) for rank in RANKS[name]))
    court.control_logs["A"].record_peer_left(2)
    court.lose_scheduler("A")
    assert not court.scheduler_state.job.finished
    court.dial("B")
    assert court.scheduler_state.job.finished and court.kinds("A") == court.kinds("B") == [m.Finish]
    court.dial("H")
    assert court.kinds("H") == [m.Finish]


def test_nodes_that_contradict_each_other_end_the_job_in_words(court):
    reports = {name: list(control_log.report()) for name, control_log in court.control_logs.items()}
    reports["B"] = [msgspec.structs.replace(reports["B"][0], committed=0, n_units=0), m.RejoinComplete()]
    court.scheduler_state = SchedulerState(court.settings, 0.0)
    for name, said in reports.items():
        for message in said:
            court.post(court.scheduler_state.receive(0.0, court.over[name], message))
    assert court.scheduler_state.job.aborted.error == "ProtocolError"
    assert "is not prepared for 1" in court.scheduler_state.job.aborted.reason


def test_a_recall_does_not_wait_for_a_helper_that_nobody_has_heard_of(court):
    """It was just coming, and is left behind."""
    court.post(court.scheduler_state.receive(court.now, b"J", join("j", 0)))
    assert [message.node.index for message in court.got("A", m.Joined)] == [4]
    for name in NODES:
        court.inbox.pop(court.over[name], None)
    court.dial("A")
    assert isinstance(court.inbox[b"J"][-1], m.Abort)
    court.read(*"BCH")
    assert all(court.kinds(name)[-1] is m.Resume for name in NODES)


def test_a_scheduler_that_was_stopped_gives_who_is_away_the_second_that_it_had(court):
    court.tick(4.0, NODES)
    court.scheduler_state.tick(court.now)
    court.scheduler_state.unreachable(court.now, court.over["C"])
    court.scheduler_state.receive(court.now, court.over["A"], m.ProbeResult(node=2, outcome="refused"))
    court.scheduler_state.tick(court.now + 3.0)
    for later in (3.2, 3.6, 4.0):
        court.scheduler_state.receive(court.now + later, court.over["A"], m.ProbeResult(node=2, outcome="refused"))
        court.scheduler_state.tick(court.now + later)
        assert not court.scheduler_state.over
    court.scheduler_state.tick(court.now + 4.3)
    assert court.scheduler_state.job.aborted.error == "PeerLostError"


def test_lists_of_who_takes_no_part_wait_for_nothing(court):
    message = m.Declare(rank=0, digest=b"unknown")
    assert court.scheduler_state.receive(court.now, b"stranger#1", message) == []
    assert court.scheduler_state._lists.senders == []


def test_lists_of_who_is_lost_wait_no_more(court, monkeypatch):
    """A helper that is dropped is never written to again, so no send to it fails."""
    monkeypatch.setattr("bpsfast.orchestration.long_lists.MOST_INLINE", 0)
    court.post(court.scheduler_state.receive(court.now, court.over["H"], m.CommittedUnits(digest=b"unknown")))
    assert court.scheduler_state._lists.senders == [court.over["H"]]
    court.say("A", m.Lost(who="node 3", reason="its connection has ended"))
    court.tick(court.now + 1.0, beating="ABC")
    assert court.scheduler_state._lists.senders == []
