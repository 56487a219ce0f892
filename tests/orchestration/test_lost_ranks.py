"""A rank or a node with ranks is lost, and the job goes on without it (`min_workers`): what the scheduler decides."""
from __future__ import annotations

import dataclasses

import pytest

from bpsfast.orchestration import messages as m
from tests.support import scheduler_with_nodes
from tests.support.job_table import Table, join, spec
from tests.support.lossy_table import NODES, LossyTable
from tests.support.scheduler_with_nodes import Court


def table_of(*specs, placement="optimal", **fields):
    """Return a table of ranks 0 and 1 on node 0, rank 2 on node 1, and helpers 2 and 3; *specs* are committed."""
    return LossyTable(placement, **{"min_workers": 1, **fields}).commit(*specs)


def lose_rank(table, rank, sender=b"A"):
    table.say(sender, m.Lost(who=f"rank {rank}", reason="exited with -9"))


def freeze_of(table):
    """Return the `Freeze` message, which is the same for all nodes that take part."""
    told = [table.got(sender, m.Freeze) for sender in table.alive]
    assert all(each == told[0] for each in told) and len(told[0]) == 1, (told, table.job.aborted)
    return told[0][0]


def report(table, epoch=2, everybody=(5, 5), **differs):
    """Let all nodes report *everybody* (passed on, complete) of what concerns them, but what *differs* by node name and
    partition."""
    job = table.job
    for sender in table.alive:
        index, at = job.roster.index_of(sender), differs.get(sender.decode(), {})
        ranks = job.roster.nodes[index].ranks
        table.say(sender, m.FreezeReport(epoch=epoch, progress=tuple(
            (part.part, *at.get(part.part, everybody), index if ranks else -1)
            for unit in job._generations.units for part in unit.parts
            if part.owner == index or any(not unit.ranks or rank in unit.ranks for rank in ranks))))


def recovered(table, epoch=2, **reported):
    """Go on as far as the commit; return the `Recover` message."""
    report(table, epoch, **reported)
    recover = table.recover()
    table.ready(recover.generation)
    assert all(len(table.got(sender, m.Commit)) == 1 for sender in table.alive)
    return recover


def owned_by(table, node):
    return [part.part for unit in table.job._generations.units for part in unit.parts if part.owner == node]


def test_a_rank_is_lost_alone_and_its_node_stays():
    table = table_of()
    lose_rank(table, 1)
    freeze = freeze_of(table)
    assert (freeze.epoch, freeze.lost, freeze.lost_ranks, freeze.reports_all) == (2, (), (1,), True)
    assert "rank 1 (node 0, host a) is lost: exited with -9" in freeze.reason
    recover = recovered(table)
    assert recover.owner_changes == () and recover.redone == () and recover.begins == ((0, 6),)
    assert table.job.roster.ranks == [0, 2] and not table.job.over


def test_what_is_complete_in_part_is_summed_again():
    table = table_of(placement="ps")
    sent, partial, *_ = owned_by(table, 2)
    lose_rank(table, 1)
    recover = recovered(table, A={sent: (6, 6), partial: (6, 5)}, B={sent: (6, 5), partial: (5, 5)},
                        H={sent: (6, 6)})
    assert recover.begins == ((0, 6),)
    assert {each.part: each for each in recover.redone} == {
        sent: m.Redo(part=sent, kept_round=5, was_sent=True, again=(0,), stale=((1, 2, 6),)),
        partial: m.Redo(part=partial, kept_round=5, was_sent=False, again=(0,), stale=((2, 0, 6),))}


def test_a_round_that_a_node_has_whole_stays_and_the_next_one_is_without():
    table = table_of(placement="ps")
    lose_rank(table, 1)
    recover = recovered(table, everybody=(6, 6), A=dict.fromkeys(range(8), (6, 5)))
    assert recover.redone == () and recover.begins == ((0, 7),)


def test_what_a_lost_node_owned_is_owned_by_others():
    table = table_of()
    parts = owned_by(table, 1)
    assert parts
    table.lose(b"B")
    assert [each.goes_on for each in table.got(b"B", m.Abort)] == [True]
    freeze = freeze_of(table)
    assert (freeze.lost, freeze.lost_ranks, freeze.reports_all) == ((1,), (2,), True)
    recover = recovered(table)
    assert {each.part for each in recover.owner_changes} == set(parts) and not owned_by(table, 1)
    assert recover.begins == ((0, 6),) and table.job.roster.ranks == [0, 1]


def test_a_node_is_lost_with_its_last_rank():
    table = table_of()
    lose_rank(table, 2, b"B")
    assert [each.goes_on for each in table.got(b"B", m.Abort)] == [True]
    assert freeze_of(table).lost == (1,)
    lose_rank(table, 0)
    assert freeze_of(table).lost_ranks == (0, 2)


def test_a_round_of_partitions_of_their_own_is_summed_as_it_was_begun():
    """Some have it: it stays."""
    table = table_of(spec("s", shape=(2048,), separate=True), placement="ps")
    first, _ = (part.part for part in table.job._generations.units[0].parts)
    lose_rank(table, 1)
    recover = recovered(table, A={first: (6, 6)}, B={first: (6, 5)},
                        **{"HI"[owner - 2]: {part: (6, 6)} for owner in (2, 3) for part in owned_by(table, owner)
                           if part == first})
    assert recover.begins == () and recover.redone == ()


@pytest.mark.parametrize("how", ["rank", "node"])
def test_with_too_few_ranks_the_job_ends(how):
    table = table_of(min_workers=3)
    lose_rank(table, 1) if how == "rank" else table.lose(b"B")
    assert table.job.aborted.error == "PeerLostError"
    assert table.job.aborted.reason.endswith(
        "; 2 ranks are left, fewer than BPSFAST_MIN_WORKERS = 3, so the job ends")
    assert [each.goes_on for each in table.got(b"A", m.Abort)] == [False]


def test_the_ranks_of_a_lost_node_count_each():
    table = table_of(min_workers=2)
    table.lose(b"A")
    assert "; 1 ranks are left, fewer than BPSFAST_MIN_WORKERS = 2" in table.job.aborted.reason


def test_without_the_setting_any_loss_of_a_rank_ends_the_job():
    table = table_of(min_workers=0)
    lose_rank(table, 1)
    assert "rank 1 (node 0, host a) is lost" in table.job.aborted.reason
    assert "BPSFAST_MIN_WORKERS" not in table.job.aborted.reason


def test_a_loss_while_the_job_gathers_ends_it():
    table = Table(min_workers=1)
    table.say(b"A", join("a", 2), m.Lost(who="local rank 1", reason="exited with 1"))
    assert table.job.aborted.error == "PeerLostError"


def test_a_barrier_is_complete_without_a_lost_rank():
    table = table_of()
    for sender, rank in ((b"A", 0), (b"B", 2)):
        table.say(sender, m.BarrierEnter(rank=rank, sequence=1))
    assert not table.got(b"A", m.BarrierDone)
    lose_rank(table, 1)
    assert all(table.got(sender, m.BarrierDone) == [m.BarrierDone(sequence=1)] for sender in (b"A", b"B"))
    table.say(b"A", m.BarrierEnter(rank=0, sequence=2))
    assert not table.got(b"A", m.BarrierDone)
    table.say(b"B", m.BarrierEnter(rank=2, sequence=2))
    assert table.got(b"A", m.BarrierDone) == [m.BarrierDone(sequence=2)]


def test_what_a_lost_rank_has_said_last_is_ignored():
    table = table_of()
    lose_rank(table, 1)
    freeze_of(table)
    table.say(b"A", m.BarrierEnter(rank=1, sequence=1), m.Lost(who="rank 1", reason="once more"))
    assert table.job._barriers.missing(1) == [0, 2] and not table.got(b"A", m.Freeze) and not table.job.over


def test_a_declaration_is_complete_without_a_lost_rank_after_the_commit():
    table = table_of()
    for sender, rank in ((b"A", 0), (b"B", 2)):
        table.say(sender, m.Declare(rank=rank, tensors=(spec("x"),)))
    lose_rank(table, 1)
    freeze_of(table)
    assert not table.got(b"A", m.Plan)
    recovered(table)
    (plan,) = table.got(b"A", m.Plan)
    assert [unit.name for unit in plan.units] == ["x"]


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_plan_in_progress_is_proposed_anew(withdrawn):
    """Of what a lost rank has declared as well: it is in no sum."""
    table = table_of()
    table.declare(spec("x"))
    (plan,) = table.got(b"A", m.Plan)
    if not withdrawn:
        table.ready(plan.generation)
    lose_rank(table, 1)
    freeze_of(table)
    for sender in table.alive:
        table.got(sender, m.Commit)
        table.got(sender, m.Plan)
    recover = recovered(table)
    again = table.got(b"A", m.Plan)
    assert [unit.name for each in again for unit in each.units] == ["x"] * withdrawn
    assert len(recover.begins) == 2 - withdrawn


def test_units_are_retired_without_a_lost_rank_after_the_commit():
    table = table_of()
    for sender, rank in ((b"A", 0), (b"B", 2)):
        table.say(sender, m.Retire(rank=rank, units=(0,)))
    lose_rank(table, 1)
    freeze_of(table)
    assert not table.got(b"A", m.Retired)
    recovered(table)
    assert all(table.got(sender, m.Retired) == [m.Retired(units=(0,))] for sender in table.alive)
    assert table.job._generations.units == []


def test_a_rank_after_the_loss_retires_the_last():
    table = table_of()
    lose_rank(table, 1)
    freeze_of(table)
    recovered(table)
    table.say(b"A", m.Retire(rank=0, units=(0,)))
    assert not table.got(b"A", m.Retired)
    table.say(b"B", m.Retire(rank=2, units=(0,)))
    assert table.got(b"A", m.Retired) == [m.Retired(units=(0,))]


def test_the_order_of_the_first_remaining_rank_counts():
    table = table_of()
    lose_rank(table, 0)
    freeze_of(table)
    recovered(table)
    table.say(b"B", m.Declare(rank=2, tensors=(spec("a"), spec("b"))))
    table.say(b"A", m.Declare(rank=1, tensors=(spec("b"), spec("a"))))
    (plan,) = table.got(b"A", m.Plan)
    priority = {unit.name: unit.priority for unit in plan.units}
    assert priority["b"] > priority["a"], "rank 1 gives the order in place of rank 0"


def test_what_rank_0_had_not_declared_yet_has_an_order_too():
    table = table_of()
    table.say(b"A", m.Declare(rank=0, tensors=(spec("b"),)))
    for sender, rank in ((b"A", 1), (b"B", 2)):
        table.say(sender, m.Declare(rank=rank, tensors=(spec("a"), spec("b"))))
    table.got(b"A", m.Plan)
    lose_rank(table, 0)
    freeze_of(table)
    recovered(table)
    plans = table.got(b"A", m.Plan)
    table.ready(plans[0].generation)
    plans += table.got(b"A", m.Plan)
    priority = {unit.name: unit.priority for plan in plans for unit in plan.units}
    assert priority["b"] > priority["a"], "rank 0 had declared it first"


def test_the_job_finishes_once_all_others_have_left():
    table = table_of()
    table.say(b"A", m.RankLeft(rank=0))
    table.say(b"B", m.RankLeft(rank=2))
    lose_rank(table, 1)
    assert table.job.finished and all(table.got(sender, m.Finish) for sender in NODES)


def test_a_rank_that_has_left_is_not_lost():
    table = table_of()
    table.say(b"A", m.RankLeft(rank=1))
    lose_rank(table, 1)
    assert not table.got(b"A", m.Freeze) and not table.job.over and table.job.roster.ranks == [0, 1, 2]


def test_a_second_loss_in_a_recovery_begins_it_anew_without_both():
    table = table_of()
    lose_rank(table, 1)
    assert freeze_of(table).epoch == 2
    table.lose(b"H")
    freeze = freeze_of(table)
    assert (freeze.epoch, freeze.lost, freeze.lost_ranks, freeze.reports_all) == (3, (2,), (1,), True)
    report(table, 3)
    assert table.recover().begins == ((0, 6),)
    table.lose(b"B")
    freeze = freeze_of(table)
    assert (freeze.epoch, freeze.lost, freeze.lost_ranks, freeze.reports_all) == (4, (1, 2), (1, 2), True)
    assert "rank 1" in freeze.reason and "helper 0" in freeze.reason and "node 1" in freeze.reason
    recovered(table, 4)
    assert table.job.roster.ranks == [0] and not owned_by(table, 1) and not owned_by(table, 2)


def test_a_helper_that_is_lost_later_says_nothing_of_ranks_that_were_lost_before():
    table = table_of()
    lose_rank(table, 1)
    freeze_of(table)
    recovered(table)
    table.lose(b"H")
    freeze = freeze_of(table)
    assert (freeze.lost, freeze.lost_ranks, freeze.reports_all) == ((2,), (1,), False)
    recover = recovered(table, 3)
    assert recover.begins == () and recover.redone == ()


def unit_of_two(ranks, **fields):
    """Return a table of the unit "x" of *ranks* only, its two partitions are the helpers'."""
    table = LossyTable("ps", min_workers=1)
    for sender, rank in ((b"A", ranks[0]), (b"B", 2)):
        if rank in ranks:
            table.say(sender, m.Declare(rank=rank, tensors=(spec("x", shape=(2048,), ranks=ranks, **fields),)))
    table.ready(1)
    for sender in table.alive:
        assert table.got(sender, m.Plan) and table.got(sender, m.Commit)
    return table, [part.part for part in table.job._generations.units[0].parts]


def test_a_node_that_has_no_rank_left_in_a_unit_leaves_it():
    table, parts = unit_of_two((0, 2))
    lose_rank(table, 0)
    freeze_of(table)
    recover = recovered(table)
    assert recover.redone == tuple(m.Redo(part=part, kept_round=5, was_sent=False, leaving=(0,)) for part in parts)
    lose_rank(table, 1)
    assert freeze_of(table).lost == (0,), "that was its last rank"
    assert recovered(table, 3).begins == ()


# -- another scheduler takes over -----------------------------------------------------------------------------------


@pytest.fixture
def court(monkeypatch):
    """Everybody is welcome, "w" is committed everywhere, and the job goes on without lost ranks."""
    monkeypatch.setattr(scheduler_with_nodes, "SETTINGS",
                        dataclasses.replace(scheduler_with_nodes.SETTINGS, min_workers=1))
    court = Court()
    court.declare(spec("w"))
    court.read(*scheduler_with_nodes.NODES)
    court.read(*scheduler_with_nodes.NODES)
    return court


def test_a_node_counts_as_dead_sooner_than_where_its_loss_ends_the_job(court):
    court.tick(0.5, scheduler_with_nodes.NODES)
    court.scheduler_state.unreachable(court.now, court.over["C"])
    court.tick(1.0, "ABH")
    assert court.got("A", m.ProbeRequest) == [m.ProbeRequest(node=2)]
    court.say("A", m.ProbeResult(node=2, outcome="refused"))
    assert not court.got("A", m.Freeze), "a firewall that is just reloaded does that"
    court.tick(1.5, "ABH")
    assert [freeze.lost for freeze in court.got("A", m.Freeze)] == [(2,)]


def stopped(court, names="ABCH"):
    """Let *names* answer the `Freeze` that they read."""
    for name, messages in court.read(*names).items():
        for message in messages:
            if isinstance(message, m.Freeze):
                index = "ABCH".index(name)
                court.say(name, m.FreezeReport(epoch=message.epoch, progress=tuple(
                    (part.part, 5, 5, index if name != "H" else -1)
                    for unit in court.scheduler_state.job._generations.units for part in unit.parts
                    if name != "H" or part.owner == index)))


def test_another_scheduler_knows_which_ranks_are_lost(court):
    court.say("A", m.Lost(who="rank 1", reason="exited with -9"))
    stopped(court)
    court.read("A", "B", "C", "H")  # Recover
    court.read("A", "B", "C", "H")  # Commit
    court.lose_scheduler()
    assert all(court.kinds(name) == [m.Resume] for name in "ABCH")
    assert court.scheduler_state.job.roster.ranks == [0, 2, 3, 4]
    court.read("A", "B", "C", "H")
    for name, rank in (("A", 0), ("B", 2), ("B", 3), ("C", 4)):
        court.say(name, m.BarrierEnter(rank=rank, sequence=1))
    assert court.got("A", m.BarrierDone) == [m.BarrierDone(sequence=1)]
    court.post(court.scheduler_state.job.unreachable(court.now, court.over["H"]))
    assert court.got("A", m.Freeze)[0].lost_ranks == (1,) and not court.got("A", m.Freeze)[0].reports_all


@pytest.mark.parametrize("n_read", range(3))
def test_another_scheduler_goes_on_with_the_recovery(court, n_read):
    """*n_read*: how often nodes have read: their `Freeze`, the `Recover`; after 0 only the loss itself is repeated."""
    court.say("A", m.Lost(who="rank 1", reason="exited with -9"))
    if n_read:
        stopped(court)
    if n_read == 2:
        court.read("A", "B")
    court.lose_scheduler()
    (freeze,) = court.got("B", m.Freeze)
    assert freeze.lost_ranks == (1,) and freeze.lost == () and freeze.reports_all and freeze.epoch > 1
    stopped(court)
    assert [each.begins for each in court.got("C", m.Recover)] == [((0, 6),)]
    court.read("A", "B", "C", "H")
    assert court.kinds("C") == [m.Commit] and court.scheduler_state.job.roster.ranks == [0, 2, 3, 4]


def test_a_commit_that_one_has_read_counts(court):
    court.say("A", m.Lost(who="rank 1", reason="exited with -9"))
    stopped(court)
    court.read("A", "B", "C", "H")  # Recover
    assert [type(message) for message in court.read("B")["B"]] == [m.Commit]
    court.lose_scheduler()
    assert court.kinds("B") == [m.Resume] and court.kinds("A") == [m.Commit, m.Resume]
    assert court.scheduler_state.job.roster.ranks == [0, 2, 3, 4]


def test_a_node_that_only_a_lost_one_called_lost_is_lost_with_its_ranks(court):
    """H has read the `Freeze`, reports, and is lost before all have reported."""
    court.post(court.scheduler_state.job.unreachable(court.now, court.over["C"]))
    court.read("H")
    court.lose_scheduler("H", "A")
    court.post(court.scheduler_state.unreachable(court.now, court.over["H"]))
    court.dial("B")
    court.tick(10.0, "AB")
    (freeze,) = court.got("A", m.Freeze)
    assert freeze.lost == (2, 3) and freeze.lost_ranks == (4,) and freeze.reports_all


def test_a_node_that_does_not_come_back_is_lost_with_its_ranks(court):
    court.lose_scheduler("A", "B", "H")
    court.tick(10.0, "ABH")
    (freeze,) = court.got("A", m.Freeze)
    assert freeze.lost == (2,) and freeze.lost_ranks == (4,) and freeze.reports_all
    court.dial("C")
    assert court.kinds("C") == [m.Abort] and court.got("C", m.Abort)[0].goes_on


# -- a helper comes -------------------------------------------------------------------------------------------------


def test_a_newcomer_that_a_lost_node_was_to_expect_is_given_up_at_once():
    """It would connect to that node, and wait for it."""
    table = table_of()
    table.say(b"J", join("j", 0))
    table.say(b"A", m.NewcomerReady(node=4))
    assert not table.got(b"J", m.Welcome)
    table.lose(b"B")
    assert [each.goes_on for each in table.got(b"J", m.Abort)] == [True]
    assert [each.node for each in table.got(b"A", m.NewcomerGone)] == [4]
    recovered(table)
    assert table.job.coming == [] and not table.job.over


def test_a_loss_goes_before_a_newcomer_and_that_is_taken_in_afterwards():
    table = table_of()
    table.say(b"J", join("j", 0))
    for sender in (b"A", b"B"):
        table.say(sender, m.NewcomerReady(node=4))
    for sender in (b"A", b"B", b"J"):
        table.say(sender, m.NewcomerReady(node=4, is_linked=True))
    assert freeze_of(table).joined == (4,)
    lose_rank(table, 1)
    freeze = freeze_of(table)
    assert (freeze.epoch, freeze.joined, freeze.lost_ranks, freeze.reports_all) == (3, (), (1,), True)
    report(table, 3)
    table.say(b"J", m.FreezeReport(epoch=3))
    generation = table.recover().generation
    table.ready(generation)
    table.say(b"J", m.Ready(generation=generation))
    freeze = freeze_of(table)
    assert (freeze.epoch, freeze.joined, freeze.lost_ranks, freeze.lost) == (4, (4,), (1,), ())


# -- nodes with ranks that call each other lost -----------------------------------------------------------------------


def table_of_three(**fields):
    """Return a table of three nodes with a rank each, which have joined."""
    table = Table(num_nodes=3, min_workers=1, **fields)
    for sender, host in ((b"A", "a"), (b"B", "b"), (b"C", "c")):
        table.say(sender, join(host, 1))
    return table


def accuse(table, accuser, *nodes):
    for node in nodes:
        table.say(accuser, m.Lost(who=f"node {node}", reason="its data connection ended"))


def decided(table, to=1.0):
    """Let the time pass in which it is decided who is lost; return the nodes that are dropped."""
    for sender in (b"A", b"B", b"C"):
        if sender in table.job._heartbeats.seen:
            table.say(sender, m.Heartbeat(sequence=0))
    table.tick(to)
    return sorted(table.job.roster.lost)


def test_the_node_that_most_others_do_not_reach_is_dropped():
    """Its own network card is broken: it calls all others lost, and each of them calls it lost, or has not noticed."""
    table = table_of_three()
    accuse(table, b"A", 1, 2)
    assert table.job.roster.lost == set() and decided(table, 0.1) == []
    assert decided(table) == [0] and not table.job.over
    assert [each.goes_on for each in table.got(b"A", m.Abort)] == [True]


def test_an_accused_node_whose_connection_closes_is_lost_at_once():
    table = table_of_three()
    accuse(table, b"A", 1)
    assert table.job.roster.lost == set()
    table.post(table.job.closed(0.0, b"B"))
    assert table.job.roster.lost == {1}
    other = table_of_three()
    other.post(other.job.closed(0.0, b"B"))
    accuse(other, b"A", 1)
    assert other.job.roster.lost == {1}, "or the other way around"


def test_of_two_that_do_not_reach_each_other_the_silent_one_is_dropped_else_the_later():
    table = table_of_three(heartbeat_s=0.2, lease_s=30.0)
    accuse(table, b"C", 0)
    for now in (1.0, 2.0):
        for sender in (b"B", b"C"):
            table.now = now
            table.say(sender, m.Heartbeat(sequence=0))
    table.tick(2.1)
    assert table.job.roster.lost == {0}
    table = table_of_three()
    accuse(table, b"C", 0)
    accuse(table, b"A", 2)
    assert decided(table) == [2]


def test_data_that_makes_no_sense_ends_the_job():
    """Which sums are wrong is not known."""
    table = table_of_three()
    table.say(b"A", m.Lost(who="node 0", reason="node 1 sent what fits no partition", is_fatal=True))
    assert table.job.aborted is not None and table.job.aborted.error == "ProtocolError"


def test_what_nobody_is_left_to_push_is_not_planned():
    table = table_of()
    table.say(b"A", m.Declare(rank=1, tensors=(spec("x", ranks=(1, 2)),)))
    lose_rank(table, 1)
    recovered(table)
    table.lose(b"B")
    report(table, 3)
    table.ready(table.recover().generation)
    assert not any(table.got(sender, m.Plan) for sender in table.alive) and not table.job.over


def test_a_machine_that_may_live_is_dropped_by_a_majority_only():
    """The second of two calls the first lost, whose connection has closed, too: that may have another scheduler."""
    table = table_of()
    table.post(table.job.closed(0.0, b"A"))
    table.say(b"B", m.Lost(who="node 0", reason="its connection has ended"))
    for now in (0.6, 1.2):
        table.tick(now)
    assert not table.job.over and table.job.roster.lost == set() and not table.got(b"B", m.Freeze)
    table.post(table.job.unreachable(1.2, b"A"))
    assert table.job.roster.lost == {0} and len(table.got(b"B", m.Freeze)) == 1, "its process is dead"


def test_the_first_of_two_machines_may_drop_the_second():
    table = table_of()
    table.post(table.job.closed(0.0, b"B"))
    table.say(b"A", m.Lost(who="node 1", reason="its connection has ended"))
    assert table.job.roster.lost == {1} and len(table.got(b"A", m.Freeze)) == 1


def test_losses_that_are_not_committed_do_not_help_with_the_next():
    """Of three machines the first calls one after the other lost: it may go on without one of them."""
    table = Table(num_nodes=3, min_workers=1)
    for name in ("a", "b", "c"):
        table.say(name.upper().encode(), join(name))
    for node, sender in ((1, b"B"), (2, b"C")):
        table.post(table.job.closed(table.now, sender))
        table.say(b"A", m.Lost(who=f"node {node}", reason="its connection has ended"))
    assert table.job.roster.lost == {1}, "then it is one of three"
    table.say(b"A", m.FreezeReport(epoch=2, progress=()))
    assert not table.got(b"A", m.Recover), "node 2 takes part"
