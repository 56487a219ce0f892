"""A helper comes late: what is said to whom, who is refused, and what a job that runs does not suffer from."""
from __future__ import annotations

import pytest

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.job import late_joins
from bpsfast.orchestration.job.admission import JobSettings
from tests.support.job_table import Table, join, spec
from tests.support.lossy_table import NODES, LossyTable

NEW = b"J"


def coming(table, sender=NEW, index=4, **fields):
    """Let a helper join, and be expected by all with ranks; return the Welcome that it gets."""
    table.say(sender, join(sender.decode().lower(), 0, **fields))
    for worker in (b"A", b"B"):
        (joined,) = table.got(worker, m.Joined)
        assert (joined.node.index, joined.node.ranks, joined.node.host) == (index, (), sender.decode().lower())
        assert not table.got(sender, m.Welcome)
        table.say(worker, m.NewcomerReady(node=index))
    (welcome,) = table.got(sender, m.Welcome)
    return welcome


def link(table, sender=NEW, index=4):
    table.say(b"A", m.NewcomerReady(node=index, is_linked=True))
    table.say(sender, m.NewcomerReady(node=index, is_linked=True))
    assert not table.got(b"A", m.Freeze)
    table.say(b"B", m.NewcomerReady(node=index, is_linked=True))


def everything(table, index=4):
    """What all say whose partitions are at round 5, each read in the node's own memory."""
    owners = {part.part: part.owner for unit in table.job._generations.units for part in unit.parts}
    for sender in [*table.alive, NEW]:
        at = table.job.roster.index_of(sender)
        table.say(sender, m.FreezeReport(epoch=table.job._losses.recovery.epoch, progress=tuple(
            (part, 5, 5, at if at < 2 else -1) for part, owner in owners.items() if at < 2 or owner == at)))


def test_from_the_join_to_the_commit():
    table = LossyTable("ps", name="this job").commit()
    welcome = coming(table)
    assert welcome.job == "this job", "by that name another scheduler will know it"
    assert (welcome.index, welcome.epoch, welcome.is_late, welcome.lost) == (4, 1, True, ())
    assert [node.index for node in welcome.nodes] == list(range(5)) and welcome.kinds == (("float32", "sum"),)
    assert welcome.share_nbytes == 8192 * 4 // 5 + 4096, "all five get the same, and it may be a partition more"
    assert not table.got(b"H", m.Joined), "helpers have nothing to say to each other"
    table.commit(spec("x", shape=(8192,)))  # without it
    link(table)
    freezes = [table.got(sender, m.Freeze) for sender in (*NODES, NEW)]
    assert freezes == [[m.Freeze(epoch=2, lost=(), joined=(4,), reason="helper 2 (node 4, host j) has come",
                                  reports_all=True)]] * 5
    everything(table)
    recovers = [table.got(sender, m.Recover) for sender in (*NODES, NEW)]
    (recover,) = recovers[0]
    assert recovers == [[recover]] * 5
    assert {each.owner for each in recover.owner_changes} == {4}
    assert {each.giver for each in recover.owner_changes} == {2, 3}
    assert 4 <= len(recover.owner_changes) <= 6, "of sixteen partitions, which two had"
    for sender in (*NODES, NEW):
        assert not table.got(sender, m.Commit)
        table.say(sender, m.Ready(generation=recover.generation))
    assert all(len(table.got(sender, m.Commit)) == 1 for sender in (*NODES, NEW))
    table.declare(spec("y", shape=(8192,)))
    (plan,) = table.got(NEW, m.Plan)
    assert 4 in {part.owner for unit in plan.units for part in unit.parts} and not table.job.over


@pytest.mark.parametrize(("joiner", "error", "words"), [
    (join("j", 2), "ConfigError", "already complete with 4 nodes; the node on host j (pid 1) has 2 ranks, and only"),
    (join("j", 0, version=1), "MismatchError", "protocol version differs: 1 on host j"),
    (join("j", 0, settings={"transport": "rdma"}), "MismatchError", "setting transport differs: rdma on host j"),
])
def test_who_cannot_come_is_told_so_and_nobody_else(joiner, error, words):
    table = LossyTable().commit()
    table.say(NEW, joiner)
    (refuse,) = table.got(NEW, m.Refuse)
    assert refuse.error == error and words in refuse.reason
    assert not table.job.over and not any(table.got(sender, (m.Joined, m.Abort)) for sender in NODES)


def test_numbers_run_out_in_words(monkeypatch):
    monkeypatch.setattr(late_joins, "MAX_NODES", 4)
    table = LossyTable().commit()
    table.say(NEW, join("j", 0))
    assert "a job numbers at most 4 nodes, lost ones included" in table.got(NEW, m.Refuse)[0].reason


def test_lost_nodes_are_named_in_the_welcome_and_keep_their_numbers():
    table = LossyTable().commit()
    table.lose(b"H")
    table.frozen(table.everywhere(table.owned[2]))
    table.ready(table.recover().generation)
    assert coming(table).lost == (2,)


def test_memory_is_made_beforehand_for_what_moves_only():
    table = LossyTable("ps").commit(spec("w", shape=(8192,)), spec("c", shape=(8192,), codec=CodecSpec(kind="onebit")))
    assert coming(table).share_nbytes == 8192 * 4 // 5 + 4096
    assert coming(LossyTable("ps")).share_nbytes == 0


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_credit_that_was_tuned_holds_for_who_comes_late(when):
    table = LossyTable().commit()
    if when == "before":
        table.say(b"A", m.Credit(rank=0, nbytes=5), m.Credit(rank=0, nbytes=1 << 20))
    coming(table)
    if when == "meanwhile":
        table.say(b"A", m.Credit(rank=0, nbytes=1 << 20))
    assert table.got(NEW, m.CreditChanged) == [m.CreditChanged(nbytes=1 << 20)]
    table.say(b"B", m.NewcomerReady(node=4, is_linked=True))
    assert not table.got(NEW, m.CreditChanged), "once"


@pytest.mark.parametrize("when", ["at once", "welcomed", "linked in part"])
@pytest.mark.parametrize("how", ["gone", "lost", "late", "itself"])
def test_a_newcomer_that_is_not_there_in_the_end_is_dropped(when, how):
    table = LossyTable("ps", start_timeout_s=5.0).commit()
    if when == "at once":
        table.say(NEW, join("j", 0))
    else:
        coming(table)
    if when == "linked in part":
        table.say(b"A", m.NewcomerReady(node=4, is_linked=True))
    if how == "late":
        table.tick(5.0)
        (shutdown_notice,) = table.got(NEW, m.Abort)
        who = "node 1 (host b, rank 2)" if when != "at once" else "node 0 (host a, ranks 0, 1); node 1 (host b, rank 2)"
        assert who in shutdown_notice.reason and "start_timeout_s = 5 s" in shutdown_notice.reason
    elif how == "gone":
        table.lose(NEW)
    else:
        table.say(NEW if how == "itself" else b"A", m.Lost(who="node 4", reason="killed"))
    for worker in (b"A", b"B"):
        assert table.got(worker, m.NewcomerGone) == [m.NewcomerGone(node=4)]
        assert not table.got(worker, m.Freeze)
    table.say(b"B", m.NewcomerReady(node=4), m.NewcomerReady(node=4, is_linked=True))  # said before it had heard
    assert not table.job.over and not table.got(NEW, m.Welcome)
    table.commit(spec("x", shape=(8192,)))
    assert {*table.owned} <= {2, 3}


def test_two_newcomers_one_of_which_dies_while_all_freeze():
    table = LossyTable("ps").commit()
    coming(table, b"K", 4)
    coming(table, NEW, 5)
    link(table, NEW, 5)
    assert table.got(b"A", m.Freeze)[0].joined == (5,)
    table.lose(NEW)
    (freeze,) = table.got(b"A", m.Freeze)
    assert (freeze.epoch, freeze.lost, freeze.joined) == (3, (5,), ())
    table.frozen({}, epoch=3)
    recover = table.recover()
    assert recover.owner_changes == ()
    table.ready(recover.generation)
    assert not table.job.over and not table.got(b"K", (m.Freeze, m.Commit))


def test_a_newcomer_begins_with_the_last_epoch_that_was_committed():
    table = LossyTable("ps").commit()
    table.lose(b"H")
    epochs = [coming(table, b"K").epoch]
    table.frozen(table.everywhere(table.owned[2]))
    epochs.append(coming(table, b"L", 5).epoch)
    table.ready(table.recover().generation)
    epochs.append(coming(table, b"M", 6).epoch)
    assert epochs == [1, 1, 2], "before that some node may not have stopped for the next one yet"


def test_a_loss_meanwhile_comes_first_and_the_share_afterwards():
    table = LossyTable("ps").commit()
    coming(table)
    link(table)
    table.lose(b"H")
    freezes = table.got(b"A", m.Freeze)
    assert [(freeze.lost, freeze.joined) for freeze in freezes] == [((), (4,)), ((2,), ())]
    everything(table)
    (recover,) = table.got(NEW, m.Recover)
    assert {each.part for each in recover.owner_changes} == set(table.owned[2]) and recover.epoch == 3
    assert all(each.giver == -1 for each in recover.owner_changes)
    for sender in (b"A", b"B", b"I", NEW):
        table.say(sender, m.Ready(generation=recover.generation))
    (freeze,) = table.got(b"A", m.Freeze)
    assert (freeze.epoch, freeze.lost, freeze.joined) == (4, (), (4,))


def test_who_has_no_memory_for_its_share_gets_none_and_the_job_goes_on():
    table = LossyTable("ps").commit()
    coming(table)
    link(table)
    everything(table)
    (recover,) = table.got(NEW, m.Recover)
    table.got(b"A", m.Freeze)
    table.say(NEW, m.PrepareFailed(generation=recover.generation, reason="no memory"))
    (freeze,) = table.got(b"A", m.Freeze)
    assert (freeze.epoch, freeze.lost, freeze.joined) == (3, (), ()) and "no memory" in freeze.reason
    everything(table)
    (recover,) = table.got(NEW, m.Recover)
    assert recover.owner_changes == ()
    for sender in (*NODES, NEW):
        table.say(sender, m.Ready(generation=recover.generation))
    assert len(table.got(NEW, m.Commit)) == 1 and not table.got(b"A", m.Freeze) and not table.job.over


def test_a_newcomer_that_keeps_all_waiting_is_done_without():
    table = LossyTable("ps", start_timeout_s=5.0, lease_s=50.0).commit()
    coming(table)
    link(table)
    table.frozen(table.everywhere([*table.owned[2], *table.owned[3]]), only=(b"A", b"B"))
    for sender, index in ((b"H", 2), (b"I", 3)):
        table.say(sender, m.FreezeReport(epoch=2, progress=tuple((part, 5, 5, -1) for part in table.owned[index])))
    table.tick(5.0)
    assert not table.job.over
    assert "was to get its share" in table.got(NEW, m.Abort)[0].reason
    assert table.got(b"A", m.Freeze)[-1].lost == (4,)


@pytest.mark.parametrize("how", ["measured", "lost"])
def test_who_is_connected_while_nics_are_measured_is_taken_in_afterwards(how):
    table = LossyTable("ps", joins={b"H": {"probes": True}}, start_timeout_s=5.0, lease_s=50.0)
    table.declare(spec("w", shape=(8192,)))
    coming(table)
    link(table)
    assert not table.got(b"B", m.Freeze)
    table.tick(5.0)  # nobody keeps it waiting who could be named for that
    assert not table.got(NEW, m.Abort) and not table.got(b"A", m.NewcomerGone)
    if how == "measured":
        table.say(b"H", m.Measured(nic_rate_bytes=7.0))
    else:
        table.lose(b"H")
        assert [freeze.lost for freeze in table.got(b"A", m.Freeze)] == [(2,)]
        table.frozen({})
        table.ready(table.recover().generation)
    (freeze,) = table.got(NEW, m.Freeze)
    assert freeze.joined == (4,) and table.got(b"A", m.Freeze) == [freeze] and not table.got(b"A", m.Plan)
    everything(table)
    (recover,) = table.got(NEW, m.Recover)
    for sender in [*table.alive, NEW]:
        table.say(sender, m.Ready(generation=recover.generation))
    (plan,) = table.got(NEW, m.Plan)
    assert 4 in {part.owner for unit in plan.units for part in unit.parts}


def test_everybody_hears_of_the_end_and_beats():
    table = LossyTable().commit()
    coming(table)
    table.tick(1.0)
    assert table.got(NEW, m.Heartbeat)
    table.say(NEW, join("j", 0))  # once more, with other counts
    table.say(b"A", m.RankLeft(rank=0), m.RankLeft(rank=1))
    table.say(b"B", m.RankLeft(rank=2))
    assert table.got(NEW, m.Finish) and table.job.finished
    table.say(b"K", join("k", 0))
    assert "the job is over" in table.got(b"K", m.Refuse)[0].reason


def unasked(table):
    """A helper comes that the job, which has two, did not expect."""
    table.say(NEW, join("j", 0))
    assert not any(table.got(sender, (m.Joined, m.Freeze, m.Abort)) for sender in NODES)
    return table


@pytest.mark.parametrize("fields", [{}, {"max_helpers": 1}, {"helper_lease_s": 0.0}], ids=str)
def test_one_helper_more_than_the_job_expects_is_refused_once_nobody_can_have_been_lost(fields):
    table = unasked(LossyTable(**{"max_helpers": 0, **fields}).commit())
    waits_s = 11.0 if fields.get("helper_lease_s") == 0.0 else 2.0
    for second in range(int(waits_s)):
        table.everybody_beats(second)
        assert not table.got(NEW, m.Refuse), "one of the two may be dead, and not known to be"
    assert table.got(NEW, m.Heartbeat), "it waits, and is not left to think that the scheduler is gone"
    table.everybody_beats(waits_s)
    (refuse,) = table.got(NEW, m.Refuse)
    assert refuse.error == "ConfigError" and "BPSFAST_MAX_HELPERS" in refuse.reason
    assert "at most 2 helpers and has 2 of them (helper 0 (node 2, host h), helper 1 (node 3, host i))" in refuse.reason
    assert "the node on host j (pid 1) is one too many" in refuse.reason
    assert not table.job.over and not any(table.got(sender, (m.Joined, m.Freeze, m.Abort)) for sender in NODES)
    table.commit(spec("x", shape=(8192,)))


def test_a_job_without_helpers_lets_none_in_that_it_was_not_told_of():
    table = Table()
    table.say(b"A", join("a", 1))
    table.say(b"B", join("b", 1))
    table.say(NEW, join("j", 0))
    for second in range(3):
        table.say(b"A", m.Heartbeat(sequence=second))
        table.say(b"B", m.Heartbeat(sequence=second))
        table.tick(float(second))
    assert "at most 0 helpers and has none" in table.got(NEW, m.Refuse)[0].reason
    assert not table.got(b"A", m.Joined) and not table.job.over


@pytest.mark.parametrize(("fields", "most"), [
    ({}, 0), ({"num_helpers": 2}, 2), ({"num_helpers": 2, "max_helpers": 1}, 2), ({"max_helpers": 3}, 3),
    ({"num_server_processes": 4}, 4),  # BytePS's servers: which of them are helpers is seen when they come
])
def test_how_many_helpers_are_expected(fields, most):
    assert JobSettings(num_nodes=1, **fields).most_helpers == most


def test_as_many_as_are_expected_come_those_counted_that_are_on_their_way():
    table = LossyTable(max_helpers=3).commit()
    coming(table, b"K", 4)
    unasked(table)
    table.everybody_beats(2.0)
    assert "has 3 of them" in table.got(NEW, m.Refuse)[0].reason


@pytest.mark.parametrize("who", ["a helper", "a newcomer"])
def test_who_waits_has_the_place_of_one_that_is_lost(who):
    table = LossyTable(max_helpers=2 if who == "a helper" else 3).commit()
    if who == "a newcomer":
        coming(table, b"K", 4)
    unasked(table)
    table.lose(b"H" if who == "a helper" else b"K")
    table.everybody_beats(0.2)
    assert [joined.node.host for joined in table.got(b"A", m.Joined)] == ["j"] and not table.got(NEW, m.Refuse)
    table.everybody_beats(2.0)
    assert not table.got(NEW, m.Refuse), "once it has come it waits no more"


def test_who_dials_anew_while_it_waits_waits_once():
    table = unasked(LossyTable(max_helpers=0).commit())
    table.everybody_beats(1.0)
    table.say(b"K", join("j", 0))
    table.everybody_beats(2.0)
    assert table.got(b"K", m.Refuse) and not table.got(NEW, m.Refuse)


def test_who_waits_hears_of_the_end():
    table = unasked(LossyTable(max_helpers=0).commit())
    table.say(b"A", m.RankLeft(rank=0), m.RankLeft(rank=1))
    table.say(b"B", m.RankLeft(rank=2))
    assert table.got(NEW, m.Finish)


def test_who_dies_while_it_waits_for_room_takes_no_place_of_one_that_lives():
    table = unasked(LossyTable(max_helpers=0).commit())
    table.post(table.job.closed(0.1, NEW))
    assert NEW not in table.job.coming
    for second in range(4):
        table.everybody_beats(second)
    assert not table.got(NEW, m.Refuse) and not any(table.got(sender, m.Joined) for sender in NODES)
