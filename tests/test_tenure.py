"""A scheduler's time: a job that is new, one that another scheduler began, and whatever was missed in between."""
from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.job.generations import Generations
from bpsfast.orchestration.succession.ledger import Ledger
from bpsfast.orchestration.succession.tenure import Tenure
from tests.court import NODES, RANKS, Court, court as court
from tests.job_table import join, spec


def test_another_scheduler_goes_on_when_all_have_told_it(court):
    court.declare(spec("x"), only="AB")
    court.lose_scheduler("A", "B", "C")
    assert not any(court.inbox.values()), "nothing is decided before all have spoken"
    court.dial("H")
    assert all(court.kinds(name) == [m.Resume] for name in NODES)
    assert court.tenure.job.name == "this job"
    court.read(*NODES)
    court.declare(spec("x"), only="C")
    (plan,) = court.got("A", m.Plan)
    assert [unit.name for unit in plan.units] == ["x"] and plan.units[0].unit == 1 and plan.units[0].parts[0].part == 1
    assert plan.generation > 1 and plan.units[0].priority == -1, "it is the second that was declared"


def test_a_commit_that_one_has_read_is_everybodys(court):
    court.declare(spec("x"))
    court.read(*NODES)  # the plan
    commit = court.read("B")["B"]
    assert [type(message) for message in commit] == [m.Commit]
    court.lose_scheduler()
    assert court.kinds("B") == [m.Resume] and all(court.kinds(name) == [m.Commit, m.Resume] for name in "ACH")
    assert court.got("A", m.Commit) == commit
    court.read(*NODES)
    assert len({tuple(unit.unit for kept in ledger.account() if isinstance(kept, m.Kept) for unit in kept.units)
                for ledger in court.ledgers.values()}) == 1


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
    assert court.kinds("C") == [m.Resume] and court.kinds("A") == [m.Retired, m.Resume] and not court.tenure.over
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
        account = court.ledgers[name].account
        court.ledgers[name].account = lambda *number, account=account, gone=gone: [
            msgspec.structs.replace(each, gone_from=gone) if isinstance(each, m.Rejoin) else each
            for each in account(*number)]
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
    court.post(court.tenure.job.unreachable(court.now, b"H"))
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
    assert court.tenure.aborted.error == "PeerLostError"
    assert "node 2 (host c, rank 4) did not come back within lease_s = 10 s" in court.got("A", m.Abort)[0].reason


def test_a_helper_that_a_worker_has_seen_go_is_not_waited_for(court):
    court.say("B", m.Lost(who="node 3", reason="its connection ended"))
    court.lose_scheduler("A", "B", "C")
    assert court.kinds("A") == [m.Resume, m.Freeze]


def test_without_a_majority_nothing_is_decided_until_the_deadline(court):
    court.lose_scheduler("A", "H")
    court.tick(59.0, "AH")
    assert not court.kinds("A") and not court.tenure.over
    court.tick(60.0, "AH")
    assert court.tenure.aborted.error == "StallError"
    assert "missing node 1 (host b, ranks 2, 3); node 2 (host c, rank 4)" in court.got("A", m.Abort)[0].reason


def test_a_node_that_was_cut_off_has_everybody_say_all_again(court):
    court.declare(spec("x"))
    court.read(*NODES)
    court.inbox[b"A"].clear()  # its commit is lost
    court.dial("A")
    court.tenure.unreachable(court.now, b"A")
    assert all(court.kinds(name) == [m.Commit, m.Recall] for name in "BCH")
    court.read("B", "C", "H")
    assert court.kinds("A") == [m.Commit, m.Resume] and court.kinds("B") == [m.Resume]
    court.tick(5.0, NODES)
    assert not court.tenure.over


def test_who_has_closed_its_connection_has_a_second_to_come_back(court):
    assert not court.tenure.unreachable(court.now, b"C")
    court.tick(1.0, "ABH")
    assert court.tenure.aborted.error == "PeerLostError" and "closed its connection" in court.tenure.aborted.reason


def test_a_scheduler_that_hears_no_majority_waits_for_one(court):
    court.tick(10.0, "AH")
    assert not court.tenure.over and court.got("A", m.Recall)
    court.read("A", "H")
    court.tick(20.0, "AH")
    assert not court.tenure.over
    court.dial("B", "C")
    assert all(court.kinds(name)[-1] is m.Resume for name in NODES)


def test_nodes_that_were_never_welcomed_are_known_by_their_address(court):
    fresh = Court()
    fresh.ledgers["C"] = Ledger("1.0", {"transport": "tcp"})
    fresh.tenure, fresh.inbox = Tenure(fresh.settings, 0.0), defaultdict(list)
    fresh.post(fresh.tenure.receive(0.0, b"C", join("c", 1)))
    fresh.dial("A", "B", "H")
    assert fresh.kinds("A") == [m.Resume] and fresh.kinds("C") == [m.Welcome, m.Resume]
    assert fresh.got("C", m.Welcome)[0].index == 2 and fresh.got("C", m.Welcome)[0].job == "this job"


def test_nodes_of_another_job_are_refused(court):
    stranger = next(court.ledgers["A"].account())
    court.post(court.tenure.receive(0.0, b"Z", msgspec.structs.replace(stranger, job="another")))
    assert [message.error for message in court.inbox[b"Z"]] == ["PeerLostError"]
    assert not court.kinds("A")
    court.lose_scheduler("A")
    court.post(court.tenure.receive(0.0, b"Y", msgspec.structs.replace(stranger, job="another", index=1)))
    court.post(court.tenure.receive(0.0, b"X", msgspec.structs.replace(stranger, version=1, index=1)))
    assert [message.error for message in (*court.inbox[b"Y"], *court.inbox[b"X"])] == ["PeerLostError", "MismatchError"]
    court.dial("B", "C", "H")
    assert court.kinds("A") == [m.Resume]


def test_a_job_whose_ranks_have_all_left_is_finished_by_the_next_scheduler(court):
    for name in "AB":
        court.say(name, *(m.RankLeft(rank=rank) for rank in RANKS[name]))
    court.ledgers["A"].took_leave(2)
    court.lose_scheduler("A")
    assert not court.tenure.finished
    court.dial("B")
    assert court.tenure.finished and court.kinds("A") == court.kinds("B") == [m.Finish]
    court.dial("H")
    assert court.kinds("H") == [m.Finish]


def test_nodes_that_contradict_each_other_end_the_job_in_words(court):
    accounts = {name: list(ledger.account()) for name, ledger in court.ledgers.items()}
    accounts["B"] = [msgspec.structs.replace(accounts["B"][0], committed=0, n_units=0), m.Recounted()]
    court.tenure = Tenure(court.settings, 0.0)
    for name, said in accounts.items():
        for message in said:
            court.post(court.tenure.receive(0.0, court.over[name], message))
    assert court.tenure.aborted.error == "ProtocolError" and "is not prepared for 1" in court.tenure.aborted.reason


def test_a_recall_does_not_wait_for_a_helper_that_nobody_has_heard_of(court):
    """It was just coming, and is left behind."""
    court.post(court.tenure.receive(court.now, b"J", join("j", 0)))
    assert [message.node.index for message in court.got("A", m.Joined)] == [4]
    for name in NODES:
        court.inbox.pop(court.over[name], None)
    court.dial("A")
    assert isinstance(court.inbox[b"J"][-1], m.Abort)
    court.read(*"BCH")
    assert all(court.kinds(name)[-1] is m.Resume for name in NODES)


def test_a_scheduler_that_was_stopped_gives_who_is_away_the_second_that_it_had(court):
    court.tick(4.0, NODES)
    court.tenure.tick(court.now)
    court.tenure.unreachable(court.now, b"C")
    court.tenure.tick(court.now + 3.0)
    assert not court.tenure.over
    court.tenure.tick(court.now + 3.4)
    court.tenure.tick(court.now + 3.8)
    assert not court.tenure.over
    court.tenure.tick(court.now + 4.0)
    assert court.tenure.aborted.error == "PeerLostError"
