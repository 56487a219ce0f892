"""A scheduler's time while a job gathers: whose nodes come, which are left over, who dials anew before it begins."""
from __future__ import annotations

from dataclasses import replace

import pytest

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.errors import PeerLostError
from bpsfast.orchestration.failover.scheduler_state import SchedulerState
from tests.support.job_table import join, spec
from tests.support.scheduler_with_nodes import NODES, RANKS, SETTINGS, Court, court as court


def stranger(host, n_ranks, **fields):
    """A node of a job that began later at the same address."""
    return join(f"new {host}", n_ranks, pid=2, **fields)


def gather(court, *hosts):
    """Let another job's nodes join, one by one; return who was welcomed."""
    for host in hosts:
        court.post(court.scheduler_state.receive(court.now, b"new " + host.encode(), stranger(host, NODES[host])))
    return {host for host in hosts
            if any(isinstance(message, m.Welcome) for message in court.inbox[b"new " + host.encode()])}


@pytest.mark.parametrize("n_before", [0, 1, 3])
def test_a_node_left_over_from_an_earlier_job_is_refused_by_one_that_gathers(court, n_before):
    court.scheduler_state = SchedulerState(replace(court.settings, name="that job"), court.now)
    assert not gather(court, *"ABC"[:n_before])
    court.dial("A")
    if n_before:
        assert court.kinds("A")[0] is m.Refuse
    assert gather(court, *"ABCH"[n_before:]) == set("ABCH"[n_before:])
    (refuse,) = court.got("A", m.Refuse)
    assert refuse.error == "PeerLostError" and "another job gathers, of which the node on host new A" in refuse.reason
    assert court.scheduler_state.job.admitted and [node.host for node in court.scheduler_state.job.roster.nodes] == [
        "new A", "new B", "new C", "new H"]
    court.dial("B")
    assert court.kinds("B")[0] is m.Refuse and not court.scheduler_state.over, "so are those that come later"


def test_stale_resources_that_end_are_forgotten(court):
    court.lose_scheduler("A", "H")
    court.post(court.scheduler_state.unreachable(court.now, court.over["A"]))
    court.tick(55.0, "H")
    assert not court.scheduler_state.over
    court.post(court.scheduler_state.unreachable(court.now, court.over["H"]))
    court.tick(100.0)
    assert not court.scheduler_state.over, "the deadline is the new job's own"
    assert gather(court, *"ABCH") == set("ABCH")


def test_a_job_of_which_a_majority_lives_is_rebuilt_whoever_joins_meanwhile(court):
    court.lose_scheduler("A", "B")
    gather(court, "A")
    assert not court.kinds("A")
    court.dial("C", "H")
    assert all(court.kinds(name) == [m.Resume] for name in NODES)
    (refuse,) = court.inbox[b"new A"]
    assert isinstance(refuse, m.Refuse) and "already complete" in refuse.reason


def test_a_job_that_cannot_go_on_makes_room_for_one_that_gathers(court):
    court.lose_scheduler("A", "B", "H")
    gather(court, "A")
    court.tick(10.0, "ABH")
    assert "did not come back within lease_s" in court.got("A", m.Refuse)[0].reason and not court.scheduler_state.over
    assert gather(court, *"BCH") == set("BCH")


def test_a_job_that_has_ended_well_makes_room_for_one_that_gathers(court):
    for name in "ABC":
        court.say(name, *(m.RankLeft(rank=rank) for rank in RANKS[name][:-1]))
    court.lose_scheduler("A", "B")
    gather(court, "A")
    for name in "ABC":
        court.control_logs[name].said(m.RankLeft(rank=RANKS[name][-1]))
    court.dial("A", "B", "C")
    assert court.kinds("A") == [m.Finish] and not court.scheduler_state.over
    assert gather(court, *"BCH") == set("BCH")


def test_while_nodes_are_recalled_a_stranger_changes_nothing(court):
    court.dial("A")
    assert court.got("B", m.RejoinRequest)
    gather(court, "A")
    for name in NODES:
        court.post(court.scheduler_state.unreachable(court.now, name.encode()))
    court.dial(*NODES)
    assert all(court.kinds(name)[-1] is m.Resume for name in NODES)


def test_who_dials_anew_while_a_job_gathers_has_one_seat(court):
    scheduler_state, sent = SchedulerState(court.settings, 0.0), []
    for sender, name in ((b"A", "A"), (b"B", "B"), (b"A2", "A"), (b"C", "C"), (b"A3", "A")):
        sent += scheduler_state.receive(0.0, sender, join(name.lower(), NODES[name]))
        # a heartbeat found nobody: also before the other connection has spoken
        sent += scheduler_state.unreachable(0.0, b"A")
    assert not sent and not scheduler_state.job.admitted
    scheduler_state.tick(5.0)
    assert not scheduler_state.over
    scheduler_state.receive(5.0, b"A", join("a", 1))  # was under way over the first connection
    welcomes = scheduler_state.receive(5.0, b"H", join("h", 0))
    assert [sender for sender, _ in welcomes] == [b"A3", b"B", b"C", b"H"]
    assert welcomes[0][1].nodes[0].ranks == (0, 1)
    assert {sender for sender, message in scheduler_state.tick(9.0)} == {b"A3", b"B", b"C", b"H"}


def test_who_closes_its_connection_while_a_job_gathers_has_its_lease_to_come_back():
    """A reset connection is no proof of death, and nobody else can tell yet."""
    scheduler_state = SchedulerState(SETTINGS, 0.0)
    scheduler_state.receive(0.0, b"A", join("a", 2))
    scheduler_state.receive(0.0, b"B", join("b", 2))
    scheduler_state.unreachable(0.0, b"A")
    now = 0.0
    while not scheduler_state.over:
        assert now <= SETTINGS.lease_s + 1.0
        now += 0.2
        scheduler_state.receive(now, b"B", m.Heartbeat(sequence=1))
        scheduler_state.tick(now)
    assert now >= SETTINGS.lease_s and "host a" in scheduler_state.job.aborted.reason


@pytest.mark.parametrize("names", ["C", "H", "ABCH"], ids=str)
def test_who_dials_anew_before_it_has_read_its_welcome_keeps_its_seat(names):
    court = Court(deaf=names)
    for name in names:
        court.hang_up(name)
        court.post(court.scheduler_state.receive(0.0, court.over[name], join(name.lower(), NODES[name])))
    court.read(*[name for name in NODES if name not in names])
    for name in names:
        court.post(court.scheduler_state.unreachable(0.0, name.encode()))
        assert court.kinds(name) == [m.Welcome, m.Resume]
        assert court.got(name, m.Welcome)[0].index == "ABCH".index(name)
    court.read(*NODES)
    assert len(court.scheduler_state.job.roster.nodes) == 4 and court.scheduler_state.job.name == "this job"
    court.declare(spec("w"))
    assert court.read(*NODES)["A"] and not court.scheduler_state.over
    court.tick(5.0, NODES)
    assert [name for name in NODES if court.got(name, m.Commit)] == list(NODES)


def test_a_scheduler_that_has_ended_while_it_rebuilt_stays_ended(court):
    """Its last word to a node whose connection is gone fails, which is told to it, too."""
    court.lose_scheduler("A")
    court.post(court.scheduler_state.abort(PeerLostError("the scheduler got SIGTERM")))
    assert court.scheduler_state.over
    court.post(court.scheduler_state.unreachable(court.now, court.over["A"]))
    assert court.scheduler_state.over and "SIGTERM" in court.scheduler_state.job.aborted.reason
