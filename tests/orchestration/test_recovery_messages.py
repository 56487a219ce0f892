"""A node is lost: which messages go to whom, in which order, what is put off meanwhile, and when it ends the job."""
from __future__ import annotations

import pytest

from bpsfast.orchestration import messages as m
from tests.support.job_table import join, spec
from tests.support.lossy_table import NODES, WORKERS, LossyTable

FREEZE = (m.Freeze, m.Abort)


def silent(table, sender):
    """Let time pass until the lease of *sender* is over."""
    for now in range(1, 12):
        for other in table.alive:
            if other != sender:
                table.say(other, m.Heartbeat(sequence=now))
        table.tick(float(now))


def unreached(table):
    """A helper calls a worker lost, which is heard afterwards: only they do not reach each other."""
    table.say(b"H", m.Lost(who="node 1", reason="reset"))
    table.say(b"B", m.Heartbeat(sequence=1))  # may have been said before
    assert not any(table.got(sender, FREEZE) for sender in NODES) and not table.job.over
    table.now += 0.2
    table.say(b"B", m.Heartbeat(sequence=2))


LOSSES = {
    "its connection": (lambda table: table.lose(b"H"), "helper 0 (node 2, host h) closed its connection"),
    "its lease": (lambda table: silent(table, b"H"), "helper 0 (node 2, host h) has been silent for"),
    "a worker": (lambda table: table.say(b"B", m.Lost(who="node 2", reason="reset")),
                 "helper 0 (node 2, host h) is lost: reset (seen by node 1 (host b, rank 2))"),
    "itself": (lambda table: table.say(b"H", m.Lost(who="node 2", reason="no memory")), "(seen by helper 0"),
    "it sees no worker": (unreached, "node 1 (host b, rank 2) is lost: reset (seen by helper 0"),
}


@pytest.mark.parametrize("how", LOSSES)
def test_a_lost_helper_is_told_shutdown_notice_and_all_others_freeze(how):
    table = LossyTable().commit()
    lose, words = LOSSES[how]
    lose(table)
    (shutdown_notice,) = table.got(b"H", FREEZE)
    assert shutdown_notice.error == "PeerLostError" and words in shutdown_notice.reason
    assert "goes on without" in shutdown_notice.reason
    told = [table.got(sender, FREEZE) for sender in (b"A", b"B", b"I")]
    assert told == [told[0]] * 3 and len(told[0]) == 1
    (freeze,) = told[0]
    assert (freeze.epoch, freeze.lost) == (2, (2,)) and words in freeze.reason
    lose(table)
    table.say(b"A", m.Lost(who="node 2", reason="again"))
    assert not any(table.got(sender, FREEZE) for sender in NODES), "it is lost once"
    assert not table.job.over


def test_all_helpers_that_have_called_a_worker_lost_are_done_without_when_it_is_heard():
    table = LossyTable().commit()
    for helper in (b"H", b"I"):
        table.say(helper, m.Lost(who="node 1", reason="reset"))
        table.now += 0.06
    table.say(b"B", m.Heartbeat(sequence=1))
    assert [each.lost for each in table.got(b"A", m.Freeze)] == [(2,)], "the other one has only just said so"
    table.now += 0.06
    table.say(b"B", m.Heartbeat(sequence=2))
    assert [each.lost for each in table.got(b"A", m.Freeze)] == [(2, 3)] and not table.job.over
    assert len(table.got(b"I", m.Abort)) == 1


def test_a_helper_is_kept_that_was_right_about_a_worker():
    table = LossyTable().commit()
    table.say(b"H", m.Lost(who="node 1", reason="its process is gone"))
    assert not any(table.got(sender, FREEZE) for sender in NODES)
    table.lose(b"B")
    assert table.job.aborted.error == "PeerLostError" and "node 1 (host b, rank 2) closed" in table.job.aborted.reason


@pytest.mark.parametrize(("sender", "message", "words"), [
    (b"A", m.Lost(who="node 1", reason="killed"), "node 1 (host b, rank 2) is lost: killed (seen by node 0"),
    (b"A", m.Lost(who="rank 2", reason="killed"), "rank 2 (node 1, host b) is lost"),
    (b"H", m.Lost(who="node 9", reason="killed"), "node 9 is lost"),
    (b"B", None, "node 1 (host b, rank 2) closed its connection"),
])
def test_who_has_ranks_is_not_done_without(sender, message, words):
    table = LossyTable().commit()
    if message is None:
        table.lose(sender)
    else:
        table.say(sender, message)
    assert table.job.aborted.error == "PeerLostError" and words in table.job.aborted.reason
    assert all(table.got(each, FREEZE) == [table.job.aborted] for each in NODES if each != sender or message)


def test_from_the_freeze_to_the_commit():
    table = LossyTable().commit()
    table.lose(b"H")
    assert all(table.got(sender, m.Freeze) for sender in (b"A", b"B", b"I"))
    table.frozen(table.everywhere(table.owned[2]), only=(b"A", b"I"))
    assert not table.got(b"A", m.Recover)
    table.frozen(table.everywhere(table.owned[2]), only=(b"B",))
    recover = table.recover()
    assert (recover.epoch, recover.generation) == (2, 2)
    assert {each.kept_round for each in recover.owner_changes} == {5}
    for sender in (b"A", b"B"):
        table.say(sender, m.Ready(generation=1), m.Ready(generation=2))
    assert not table.got(b"A", m.Commit)
    table.say(b"I", m.Ready(generation=2))
    commits = [table.got(sender, m.Commit) for sender in (b"A", b"B", b"I")]
    assert commits == [[m.Commit(generation=2, order=tuple(range(8)))]] * 3 and not table.got(b"H", m.Commit)
    table.say(b"A", m.Ready(generation=2), m.FreezeReport(epoch=2))
    table.say(b"H", m.Ready(generation=2), m.Heartbeat(sequence=1))
    assert not any(table.got(sender, (m.Recover, *FREEZE)) for sender in (b"A", b"B", b"I"))
    table.commit(spec("x", shape=(8192,)))
    assert set(table.owned) == {0, 1, 2, 3} and len(table.owned[2]) == 2, "nothing new is placed on who is lost"


def test_a_helper_is_lost_before_anything_is_declared():
    table = LossyTable("ps")
    table.lose(b"H")
    table.frozen({})
    recover = table.recover()
    assert (recover.units, recover.owner_changes) == ((), ())
    table.ready(recover.generation)
    assert [table.got(sender, m.Commit) for sender in table.alive] == [[m.Commit(generation=1, order=())]] * 3
    table.commit()
    assert set(table.owned) == {3}


def test_a_plan_in_flight_is_withdrawn_and_proposed_anew():
    table = LossyTable().commit()
    table.declare(spec("x", shape=(8192,)))
    (plan,) = table.got(b"A", m.Plan)
    table.say(b"A", m.Ready(generation=plan.generation))
    table.lose(b"H")
    table.ready(plan.generation)  # they had not read the Freeze yet
    table.say(b"B", m.PrepareFailed(generation=plan.generation, reason="no memory"))
    assert not table.got(b"A", (m.Commit, m.DeclareFailed)), "its generation was withdrawn"
    table.frozen(table.everywhere(table.owned[2]))
    generation = table.recover().generation
    assert generation == plan.generation + 1
    table.ready(generation)
    kinds = [type(message) for message in table.inbox[b"A"] if isinstance(message, m.Plan | m.Commit)]
    assert kinds == [m.Commit, m.Plan]
    again = table.got(b"A", m.Plan)[0]
    assert [unit.name for unit in again.units] == ["x"] and again.generation == generation + 1
    numbers = {part.part for unit in (*plan.units, *again.units) for part in unit.parts}
    assert len(numbers) == 16, "no number is used again"
    assert all(part.owner != 2 for unit in again.units for part in unit.parts)


def test_declaring_and_retiring_wait_for_the_commit():
    table = LossyTable().commit()
    unit = table.job._generations.units[0].unit
    table.lose(b"H")
    table.say(b"B", m.Retire(rank=2, units=(unit,)))
    table.declare(spec("x", shape=(8192,)))
    table.say(b"A", *(m.Retire(rank=rank, units=(unit,)) for rank in (0, 1)))
    table.say(b"A", *(m.BarrierEnter(rank=rank, sequence=1) for rank in (0, 1)))
    table.say(b"B", m.BarrierEnter(rank=2, sequence=1))
    assert table.got(b"A", m.BarrierDone) and not table.got(b"A", (m.Plan, m.Retired))
    table.say(b"A", m.StallQuestion(rank=0, question=1, part=-1, round=-1, name="x"))
    (answer,) = table.got(b"A", m.StallAnswer)
    assert "helper 1 (node 3, host i): to go on without what was lost (helper 0 (node 2" in answer.missing
    table.frozen(table.everywhere(table.owned[2]))
    table.ready(table.recover().generation)
    kinds = [type(message) for message in table.inbox[b"A"] if isinstance(message, m.Plan | m.Commit | m.Retired)]
    assert kinds == [m.Commit, m.Plan, m.Retired]


@pytest.mark.parametrize("when", ["freezing", "preparing", "ready but for one"])
def test_a_second_loss_begins_anew_with_both(when):
    table = LossyTable("ps").commit()
    table.lose(b"H")
    for sender in NODES:
        table.got(sender, FREEZE)
    table.frozen(table.everywhere(table.owned[2]), only=WORKERS if when == "freezing" else NODES)
    if when != "freezing":
        assert {each.owner for each in table.recover().owner_changes} == {3}
    if when == "ready but for one":
        for sender in WORKERS:
            table.say(sender, m.Ready(generation=2))
    table.lose(b"I")
    (freeze,) = table.got(b"B", FREEZE)
    assert (freeze.epoch, freeze.lost) == (3, (2, 3)) and "helper 0" in freeze.reason and "helper 1" in freeze.reason
    table.frozen(table.everywhere(table.owned[2]), epoch=2)
    table.ready(2)
    assert not table.got(b"A", (m.Recover, m.Commit)), "these were words of the epoch before"
    table.frozen(table.everywhere([*table.owned[2], *table.owned[3]]), epoch=3)
    recover = table.recover()
    assert {each.part for each in recover.owner_changes} == set(range(8)) and recover.epoch == 3
    assert {each.owner for each in recover.owner_changes} <= {0, 1}
    table.ready(recover.generation)
    assert [commit.generation for commit in table.got(b"A", m.Commit)] == [recover.generation]


def test_who_lends_a_result_is_told_only_once():
    table = LossyTable("ps").commit()
    sent = []
    for epoch, (sender, index) in enumerate(((b"H", 2), (b"I", 3)), 2):
        progress = table.everywhere(table.owned[index], 6, 6) | {b"B": [(part, 6, 5, 1) for part in table.owned[index]]}
        table.lose(sender)
        table.frozen(progress, epoch=epoch)
        recover = table.recover()
        sent += [(each.part, each.keeper, each.lacking, each.lent) for each in recover.owner_changes]
        table.owned[3] += table.owned[2]
        table.ready(recover.generation)
    assert sorted(sent[:4]) == [(part, 0, (1,), False) for part in table.owned[2]]
    assert sorted(sent[4:]) == [(part, 0, (1,), part in table.owned[2]) for part in sorted(set(table.owned[3]))]
    table.say(b"A", *(m.Retire(rank=rank, units=(0,)) for rank in (0, 1)))
    table.say(b"B", m.Retire(rank=2, units=(0,)))
    assert table.got(b"A", m.Retired)
    assert not table.job._generations.changes, "their numbers are used again, from round 1"


def test_a_worker_that_is_lost_while_the_others_freeze_ends_the_job():
    table = LossyTable().commit()
    table.lose(b"H")
    table.say(b"A", m.Lost(who="node 1", reason="killed"))
    assert "node 1 (host b, rank 2) is lost" in table.job.aborted.reason


@pytest.mark.parametrize(("progress", "error", "words"), [
    ({b"A": (5, 5), b"B": (5, 3)}, "ProtocolError", "and has round 3, but round 5 is complete elsewhere"),
    ({b"A": (5, 5), b"B": None}, "ProtocolError", "nodes [1] say nothing of partition"),
])
def test_reports_that_contradict_each_other_end_the_job_in_words(progress, error, words):
    table = LossyTable().commit()
    table.lose(b"H")
    table.frozen({sender: [(part, *rounds, index) for part in table.owned[2] if rounds]
                  for index, (sender, rounds) in enumerate(progress.items())})
    assert table.job.aborted.error == error and words in table.job.aborted.reason
    assert table.job.aborted.reason.startswith("helper 0 (node 2, host h) closed its connection")
    assert "and the job cannot go on without it" in table.job.aborted.reason


def given(recover):
    """The bytes that each node gets by *recover*."""
    changed = {each.part for each in recover.owner_changes}
    found = {}
    for unit in recover.units:
        for part in unit.parts:
            if part.part in changed:
                found[part.owner] = found.get(part.owner, 0) + part.wire_nbytes
    return found


def lost_with_little_room(placement, rooms, is_known=True):
    """A helper is lost; nodes refuse more than *rooms*, by index, which they know. Return what each is given in the
    end, and how often it was tried.
    """
    table, epoch = LossyTable(placement).commit(), 2
    table.lose(b"H")
    while not table.job.over:
        assert [freeze.epoch for freeze in table.got(b"A", m.Freeze)] == [epoch]
        table.frozen(table.everywhere(table.owned[2]), epoch=epoch)
        if table.job.over:
            break
        recover = table.recover()
        found = given(recover)
        short = next((node for node, room in rooms.items() if found.get(node, 0) > room), None)
        if short is None:
            table.ready(recover.generation)
            assert len(table.got(b"A", m.Commit)) == 1
            return table, found, epoch - 1
        guessed = rooms[short] if is_known else 1 << 40
        table.say(NODES[short], m.PrepareFailed(generation=recover.generation, reason="no memory", room_nbytes=guessed))
        epoch += 1
    return table, {}, epoch - 1


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "guessed"])
@pytest.mark.parametrize(("placement", "rooms"), [
    ("ps", {3: 0}), ("ps", {3: 4096}), ("optimal", {0: 0}), ("optimal", {0: 0, 3: 0}), ("ps", {0: 0, 1: 0}),
    ("ps", {0: 4096, 3: 4096}),
], ids=str)
def test_others_get_what_a_node_has_no_memory_for(placement, rooms, is_known):
    lost = sum(part.wire_nbytes for unit in LossyTable(placement).commit().job._generations.units for part in unit.parts
               if part.owner == 2)
    table, found, n_tries = lost_with_little_room(placement, rooms, is_known)
    assert sum(found.values()) == lost and all(found.get(node, 0) <= room for node, room in rooms.items())
    assert n_tries <= 1 + (1 if is_known else 6) * len(rooms)
    table.declare(spec("x"))
    assert len(table.got(b"A", m.Plan)) == 1, "what was refused once counts no more"


def test_where_nobody_has_memory_for_it_the_job_ends_with_the_figures():
    table, _, _ = lost_with_little_room("ps", {0: 0, 1: 0, 3: 4096})
    assert table.job.aborted.error == "CapacityError"
    assert "helper 0 (node 2, host h) closed its connection" in table.job.aborted.reason
    assert "bytes of partitions need another owner, and no memory is left for all of them" in table.job.aborted.reason
    assert "node 0 0 bytes, node 1 0 bytes, node 3 4096 bytes more" in table.job.aborted.reason


@pytest.mark.parametrize(("reason", "placement", "room"), [("node 0 did not say where slots lie", "optimal", -1),
                                                           ("no memory for what it owns anyway", "ps", 0)])
def test_who_cannot_prepare_to_go_on_ends_the_job(reason, placement, room):
    table = LossyTable(placement).commit()
    table.lose(b"H")
    table.frozen(table.everywhere(table.owned[2]))
    table.say(b"B", m.PrepareFailed(generation=table.recover().generation, reason=reason, room_nbytes=room))
    assert table.job.aborted.error == "CapacityError" and reason in table.job.aborted.reason
    assert "node 1 (host b, rank 2) cannot go on without what the job has lost (helper 0" in table.job.aborted.reason


@pytest.mark.parametrize("when", ["freezing", "preparing"])
def test_who_does_not_answer_in_time_is_named(when):
    table = LossyTable(start_timeout_s=5.0).commit()
    table.lose(b"H")
    if when == "preparing":
        table.frozen(table.everywhere(table.owned[2]))
    for sender in (b"A", b"I"):
        table.say(sender, m.Ready(generation=2) if when == "preparing" else m.FreezeReport(epoch=2))
    table.tick(4.9)
    assert not table.job.over
    table.tick(5.0)
    assert table.job.aborted.error == "StallError"
    assert table.job.aborted.reason.startswith("node 1 (host b, rank 2) did not answer within start_timeout_s = 5 s")
    assert "helper 0 (node 2, host h) closed" in table.job.aborted.reason


def test_a_helper_that_still_measures_its_nic_is_waited_for_no_more():
    table = LossyTable("ps", joins={sender: {"probes": True} for sender in (b"A", b"H")})
    table.declare(spec("w", shape=(8192,)))
    table.say(b"A", m.Measured(nic_rate_bytes=7.0))
    table.lose(b"H")
    kinds = [type(message) for message in table.inbox[b"A"] if not isinstance(message, m.Welcome)]
    assert kinds == [m.Rates, m.Freeze], "and nothing is planned before the others have parted with it"
    table.frozen({})
    table.ready(table.recover().generation)
    (plan,) = table.got(b"A", m.Plan)
    assert {part.owner for unit in plan.units for part in unit.parts} == {3}


def test_who_was_lost_is_refused_if_it_comes_again():
    table = LossyTable().commit()
    table.lose(b"H")
    table.got(b"H", m.Abort)
    table.say(b"H", join("h", 0))
    assert "helper 0 (node 2, host h) was lost, and the job goes on without it" in table.got(b"H", m.Refuse)[0].reason


def test_all_ranks_may_leave_while_the_others_freeze():
    table = LossyTable().commit()
    table.lose(b"H")
    table.say(b"A", m.RankLeft(rank=0), m.RankLeft(rank=1))
    table.say(b"B", m.RankLeft(rank=2))
    assert table.job.finished and all(table.got(sender, m.Finish) for sender in (b"A", b"B", b"I"))
    table.frozen(table.everywhere(table.owned[2]))
    assert not table.got(b"A", m.Recover)
