"""The scheduler's decisions on joining, declaring, barriers and leaving: a table for each."""
from __future__ import annotations

import pytest

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.errors import ConfigError, ProtocolError
from bpsfast.orchestration.job.admission import JobSettings
from bpsfast.orchestration.job.job import Job
from tests.support.job_table import ALL, Table, committed, join, spec, welcomed

# -- joining ----------------------------------------------------------------------------------------------

def test_everybody_gets_the_same_welcome():
    table = welcomed()
    welcomes = [table.got(sender, m.Welcome) for sender in ALL]
    assert [w[0].index for w in welcomes] == [0, 1, 2]
    assert len({(w[0].epoch, w[0].nodes) for w in welcomes}) == 1
    assert [(n.host, n.ranks) for n in welcomes[0][0].nodes] == [("a", (0, 1)), ("b", (2, 3)), ("h", ())]


def test_a_rejoin_corrects_the_counts():
    table = Table(num_nodes=1, num_server_processes=1)
    table.say(b"A", join("a", 0, server_processes=1), join("a", 2, server_processes=1))
    assert table.got(b"A", m.Welcome)[0].nodes[0].ranks == (0, 1)


@pytest.mark.parametrize(("bad", "words"), [
    (join("b", version=99), "protocol version differs: 99 on host b"),
    (join("b", package="2.0"), "package version differs: 2.0 on host b"),
    (join("b", settings={"transport": "shm"}), "setting transport differs: shm on host b (pid 1), tcp on the"),
])
def test_a_mismatch_refuses_the_culprit_and_aborts_the_others(bad, words):
    table = Table(package="1.0", fingerprint={"transport": "tcp"})
    table.say(b"A", join("a"))
    table.say(b"B", bad)
    (refuse,) = table.inbox[b"B"]
    assert isinstance(refuse, m.Refuse) and refuse.error == "MismatchError" and words in refuse.reason
    assert table.inbox[b"A"] == [m.Abort(error="MismatchError", reason=refuse.reason)] == [table.job.aborted]
    table.say(b"C", join("c"))
    assert table.inbox[b"C"] == [table.job.aborted]


def test_one_node_too_many_aborts_before_and_is_refused_after_the_welcome():
    table = Table()
    table.say(b"A", join("a", index=0))
    table.say(b"B", join("b", index=0))
    assert "node_index 0" in table.job.aborted.reason and table.job.aborted.error == "ConfigError"
    table = welcomed()
    table.say(b"Z", join("z"))
    (refuse,) = table.inbox[b"Z"]
    assert isinstance(refuse, m.Refuse) and "already complete with 3 nodes; the node on host z" in refuse.reason
    assert not table.job.over


def test_nothing_is_planned_before_all_who_measure_have():
    table = Table()
    table.say(b"A", join("a", probes=True))
    table.say(b"B", join("b", probes=True))
    table.say(b"A", m.Declare(rank=0, tensors=(spec("x"),)))
    table.say(b"B", m.Declare(rank=1, tensors=(spec("x"),)))
    table.say(b"A", m.Measured(nic_rate_bytes=7.0))
    assert not table.got(b"A", m.Plan) and not table.got(b"A", m.Rates)
    table.say(b"A", m.StallQuestion(rank=0, question=1, part=-1, round=0, name="x"))
    (answer,) = table.got(b"A", m.StallAnswer)
    assert answer.missing == "missing: node 1 (host b, rank 1): is still measuring its NIC"
    table.say(b"B", m.Measured(nic_rate_bytes=3.0))
    for sender in (b"A", b"B"):
        assert table.got(sender, m.Rates) == [m.Rates(nic_rate_bytes=(7.0, 3.0))]
        assert len(table.got(sender, m.Plan)) == 1
    table.say(b"B", m.Measured(nic_rate_bytes=3.0))
    assert "has measured its NIC, and was not to" in table.job.aborted.reason


def test_ranks_that_do_not_fit_abort():
    table = Table(size=5)
    table.say(b"A", join("a", 2))
    table.say(b"B", join("b", 2))
    assert all(table.inbox[sender] == [table.job.aborted] for sender in (b"A", b"B"))
    assert table.job.aborted.reason.startswith("size is 5, but 4 ranks are there")


@pytest.mark.parametrize(("fields", "words"), [
    ({"placement": "ps", "num_nodes": 1}, "placement ps puts all sums on helper nodes, but the job has none"),
    ({"placement": "hash:mixed", "num_nodes": 1, "num_helpers": 0}, None),
])
def test_a_placement_that_cannot_place_aborts_at_the_start(fields, words):
    table = Table(**fields)
    table.say(b"A", join("a"))
    assert (table.job.aborted.reason.startswith(words) if words else table.got(b"A", m.Welcome))


@pytest.mark.parametrize("fields", [{"num_nodes": 0}, {"num_nodes": -1}, {"num_nodes": -2, "size": 2},
                                    {"placement": "best"}])
def test_settings_are_checked(fields):
    with pytest.raises(ConfigError):
        Job(JobSettings(**{"num_nodes": 1, **fields}), 0.0)


def test_the_start_deadline_names_who_is_missing():
    table = Table(num_helpers=1)
    table.say(b"A", join("a", 2))
    table.say(b"H", join("h", 0))
    for now in range(2, 60, 2):
        table.tick(now)
        table.say(b"A", m.Heartbeat(sequence=now))
        table.say(b"H", m.Heartbeat(sequence=now))
    assert not table.job.over
    table.tick(60.0)
    assert table.job.aborted.error == "StallError"
    assert "start_timeout_s = 60 s: have node 0 (a, 2 ranks), helper 0 (h); missing node 1 (never joined)" in (
        table.job.aborted.reason)
    assert table.got(b"A", m.Abort) == table.got(b"H", m.Abort) == [table.job.aborted]


def test_under_a_launcher_the_start_begins_with_the_first_node_that_has_ranks():
    """Helpers come at once; a program may take its time before it joins, or never do so."""
    table = Table(num_helpers=1, awaits_ranks=True)
    table.say(b"H", join("h", 0))
    wait(table, 600.0, b"H")
    assert not table.job.over
    table.say(b"A", join("a", 2))
    wait(table, 658.0, b"A", b"H")
    assert not table.job.over
    table.tick(660.0)
    assert "missing node 1 (never joined)" in table.job.aborted.reason
    others = Table(num_helpers=1, awaits_ranks=True)
    wait(others, 600.0)
    for sender, n_ranks in ((b"A", 2), (b"B", 2), (b"H", 0)):
        others.say(sender, join(sender.decode(), n_ranks))
    assert others.job.admitted


def gathering(*senders, now=0.0, **fields):
    """Two nodes with ranks are awaited, and a helper; those of *senders* have come."""
    table = Table(**{"num_helpers": 1} | fields)
    for sender in senders:
        table.say(sender, join(sender.decode().lower(), 0 if sender == b"H" else 2))
    return table


def wait(table, to, *senders):
    """Let the time pass; *senders* beat."""
    while table.now < to:
        table.tick(table.now + 2.0)
        for sender in senders:
            table.say(sender, m.Heartbeat(sequence=1))


@pytest.mark.parametrize("fields", [
    {}, {"placement": "ps"}, {"num_helpers": 0, "num_server_processes": 3}, {"num_nodes": -1, "size": 4},
], ids=["helpers", "ps", "server processes", "by ranks"])
def test_a_job_whose_helpers_do_not_come_starts_without_them(fields):
    table = gathering(b"A", b"B", **fields)
    wait(table, 28.0, b"A", b"B")
    assert not table.got(b"A", m.Welcome)
    wait(table, 30.0, b"A", b"B")
    for sender in (b"A", b"B"):
        (welcome,) = table.got(sender, m.Welcome)
        assert [node.host for node in welcome.nodes] == ["a", "b"]
    n_missing = 3 if fields.get("num_server_processes") else 1
    assert f"starts without {n_missing} of its helpers, which have not joined within 30 s" in table.job.remarks[0]
    table.say(b"A", *(m.Declare(rank=rank, tensors=(spec("x"),)) for rank in (0, 1)))
    table.say(b"B", *(m.Declare(rank=rank, tensors=(spec("x"),)) for rank in (2, 3)))
    assert len(table.got(b"A", m.Plan)) == 1
    table.say(b"H", join("h", 0))
    assert [joined.node.host for joined in table.got(b"A", m.Joined)] == ["h"]


def test_nodes_with_ranks_that_come_late_do_not_wait_for_helpers_any_more():
    table = gathering(b"A")
    wait(table, 50.0, b"A")
    assert not table.got(b"A", m.Welcome) and not table.job.over
    table.say(b"B", join("b", 2))
    wait(table, 52.0, b"A", b"B")
    assert len(table.got(b"A", m.Welcome)) == 1


@pytest.mark.parametrize("how", ["closes", "is silent", "fails", "says what makes no sense", "cannot be read"])
def test_a_helper_that_goes_while_the_job_gathers_may_come_again(how):
    table = gathering(b"A", b"H")
    if how == "closes":
        table.post(table.job.closed(1.0, b"H"))
    elif how == "is silent":
        wait(table, 12.0, b"A")
    elif how == "fails":
        table.say(b"H", m.Lost(who="the node on h", reason="no memory"))
    elif how == "cannot be read":
        table.post(table.job.unreadable(1.0, b"H", ProtocolError("7 bytes")))
    else:
        table.say(b"H", m.Ready(generation=1))
    assert not table.job.over and [abort.goes_on for abort in table.got(b"H", m.Abort)] == [True]
    assert "without a helper that had joined" in table.job.remarks[0]
    table.say(b"I", join("i", 0))
    table.say(b"B", join("b", 2))
    assert len(table.got(b"A", m.Welcome)) == len(table.got(b"I", m.Welcome)) == 1


def test_a_node_with_ranks_whose_connection_closes_while_the_job_gathers_may_dial_anew():
    table = gathering(b"A", b"H")
    table.post(table.job.closed(1.0, b"A"))
    wait(table, 8.0, b"H")
    table.say(b"A'", join("a", 2))
    table.say(b"B", join("b", 2))
    assert len(table.got(b"A'", m.Welcome)) == 1 and not table.got(b"A", m.Welcome)


@pytest.mark.parametrize(("extra", "error", "words"), [
    (join("i", 0), "ConfigError", "num_helpers is 1, but 2 nodes without ranks joined: h, i"),
    (join("i", 0, version=1), "MismatchError", "protocol version differs: 1 on host i"),
    (join("i", 0, settings={"transport": "rdma"}), "MismatchError", "setting transport differs: rdma on host i"),
])
def test_a_helper_that_does_not_fit_is_refused_alone_while_the_job_gathers(extra, error, words):
    table = gathering(b"A", b"H")
    table.say(b"I", extra)
    (refuse,) = table.got(b"I", m.Refuse)
    assert refuse.error == error and words in refuse.reason and words in table.job.remarks[0]
    table.say(b"B", join("b", 2))
    assert len(table.got(b"H", m.Welcome)) == 1 and not table.job.over


def test_a_node_with_ranks_is_refused_alone_where_all_ranks_are_there():
    table = gathering(b"A", b"B")
    table.say(b"C", join("c", 2))
    (refuse,) = table.got(b"C", m.Refuse)
    assert "has all its nodes with ranks (a, b); the node on host c (pid 1, 2 ranks) is one too many" in refuse.reason
    table.say(b"H", join("h", 0))
    assert len(table.got(b"A", m.Welcome)) == 1


def test_strangers_are_not_heard():
    table = Table()
    table.say(b"Z", m.Heartbeat(sequence=1), m.Lost(who="rank 0", reason="x"), m.Ready(generation=1))
    assert not table.inbox and not table.job.over


# -- declaring --------------------------------------------------------------------------------------------

def test_a_plan_is_committed_when_everybody_is_ready():
    table = welcomed()
    for rank, sender in ((3, b"B"), (0, b"A"), (2, b"B")):
        table.say(sender, m.Declare(rank=rank, tensors=(spec("a"), spec("b", shape=(3_000_000,)))))
    assert not table.got(b"A", m.Plan)
    table.say(b"A", m.Declare(rank=1, tensors=(spec("b", shape=(3_000_000,)), spec("a"))))
    plans = [table.got(sender, m.Plan) for sender in ALL]
    assert plans[0] == plans[1] == plans[2] and plans[0][0].generation == 1
    a, b = plans[0][0].units
    assert (a.name, a.priority, b.name, b.priority) == ("a", 0, "b", -1)
    assert len(b.parts) == 3 and {part.owner for part in (*a.parts, *b.parts)} == {0, 1, 2}
    table.say(b"A", m.Ready(generation=1))
    table.say(b"A", m.Ready(generation=1))
    table.say(b"H", m.Ready(generation=1))
    assert not table.got(b"A", m.Commit)
    table.say(b"B", m.Ready(generation=1))
    assert [table.got(sender, m.Commit) for sender in ALL] == [[m.Commit(generation=1, order=(0, 1, 2, 3))]] * 3


def test_one_generation_is_in_flight_and_the_rest_is_one_batch():
    table = welcomed()
    for name in ("a", "b", "c"):
        for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
            table.say(sender, *(m.Declare(rank=rank, tensors=(spec(name),)) for rank in ranks))
    assert [unit.name for plan in table.got(b"A", m.Plan) for unit in plan.units] == ["a"]
    for sender in ALL:
        table.say(sender, m.Ready(generation=1))
    (plan,) = table.got(b"A", m.Plan)
    assert [(u.name, u.unit, u.parts[0].part, u.priority) for u in plan.units] == [("b", 1, 1, -1), ("c", 2, 2, -2)]
    assert sorted(part.owner for unit in plan.units for part in unit.parts) == [1, 2]


def test_urgency_is_ranked_over_all_generations():
    table = committed("a", "b")
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=(spec("c", priority=1),)) for rank in ranks))
    for sender in ALL:
        table.say(sender, m.Ready(generation=2))
    assert table.got(b"H", m.Commit) == [m.Commit(generation=2, order=(1, 2, 0))]


def test_a_mismatch_is_told_to_all_that_declared_it_then_and_later():
    table = welcomed()
    table.say(b"B", m.Declare(rank=2, tensors=(spec("a"),)))
    table.say(b"B", m.Declare(rank=3, tensors=(spec("a", dtype="int8"),)))
    (failed,) = table.got(b"B", m.DeclareFailed)
    assert failed.names == ("a",) and failed.error == "MismatchError"
    assert "'a': dtype differs: 'float32' on rank 2, 'int8' on rank 3" in failed.reason
    assert not table.got(b"A", m.DeclareFailed)
    table.say(b"A", m.Declare(rank=0, tensors=(spec("a"),)))
    assert table.got(b"A", m.DeclareFailed) == [failed]
    assert not table.job.over


def test_a_node_that_cannot_prepare_rolls_everybody_back():
    table = welcomed()
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=(spec("a"), spec("b"))) for rank in ranks))
        table.say(sender, *(m.Declare(rank=rank, tensors=(spec("c"),)) for rank in ranks))
    table.say(b"A", m.Ready(generation=1))
    table.say(b"H", m.PrepareFailed(generation=1, reason="needs 9 bytes, has 8"))
    table.say(b"B", m.Ready(generation=1), m.PrepareFailed(generation=1, reason="late"))
    for sender in ALL:
        (failed,) = table.got(sender, m.DeclareFailed)
        assert (failed.names, failed.error) == (("a", "b"), "CapacityError")
        assert "helper 0 (node 2, host h) cannot prepare generation 1: needs 9 bytes, has 8" in failed.reason
        assert not table.got(sender, m.Commit)
        _, second = table.got(sender, m.Plan)
        assert (second.generation, second.units[0].unit, second.units[0].parts[0].part) == (2, 2, 2)
    for sender in ALL:
        table.say(sender, m.Ready(generation=2))
    assert table.got(b"A", m.Commit) == [m.Commit(generation=2, order=(1, 2, 0))]


def test_too_many_partitions_fail_in_numbers():
    table = welcomed(partition_nbytes=4096)
    big = spec("a", shape=(65537 * 1024,))
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=(big,)) for rank in ranks))
    (failed,) = table.got(b"H", m.DeclareFailed)
    assert failed.error == "CapacityError" and "65537 partitions" in failed.reason


def test_an_edition_that_nobody_has_room_for_takes_nothing_else_with_it():
    table = welcomed(partition_nbytes=4096)
    declared = (spec("a", shape=(65537 * 1024,)), spec("b~1", edition_of="b"), spec("c~1", edition_of="c"))
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=declared) for rank in ranks))
    assert [failed.names for failed in table.got(b"H", m.DeclareFailed)] == [("a",)]
    assert [[unit.name for unit in plan.units] for plan in table.got(b"A", m.Plan)] == [["b~1"]]
    for sender in ALL:
        table.say(sender, m.PrepareFailed(generation=1, reason="no memory") if sender == b"H"
                  else m.Ready(generation=1))
    assert [failed.names for failed in table.got(b"A", m.DeclareFailed)][-1] == ("b~1",)
    assert [[unit.name for unit in plan.units] for plan in table.got(b"A", m.Plan)][-1] == ["c~1"]


def test_who_holds_up_an_edition_is_named_though_it_prepares_something_else():
    table = welcomed()
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=(spec("a"), spec("b~1", edition_of="b"))) for rank in ranks))
    table.say(b"A", m.Ready(generation=1))
    table.say(b"H", m.Ready(generation=1))
    for name, words in (("a", "is still preparing memory for 'a'"),
                        ("b~1", "is still preparing memory for what is before 'b~1'")):
        table.say(b"A", m.StallQuestion(rank=0, question=7, part=-1, round=0, name=name))
        (answer,) = table.got(b"A", m.StallAnswer)
        assert answer.nodes == (1,) and "host b" in answer.missing and words in answer.missing, answer


def test_what_a_helper_has_room_for_once_units_are_retired_counts_for_the_next_plan():
    table = Table(num_helpers=1)
    for sender, joined in ((b"A", join("a", 2)), (b"H", join("h", 0, room_nbytes=0)), (b"B", join("b", 2))):
        table.say(sender, joined)
    owners = []
    for name, generation in (("a", 1), ("b", 2)):
        for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
            table.say(sender, *(m.Declare(rank=rank, tensors=(spec(name, shape=(9_000_000,)),)) for rank in ranks))
        (plan,) = table.got(b"A", m.Plan)
        owners.append({part.owner for part in plan.units[0].parts})
        for sender in ALL:
            table.say(sender, m.Ready(generation=generation, ownable_nbytes=0 if sender == b"H" else -1))
        retire(table, 0, 1, 2, 3, units=(generation - 1,))
        table.say(b"H", m.MemoryFreed(ownable_nbytes=1 << 30))
    assert owners == [{0, 1}, {0, 1, 2}] and not table.job.over


# -- barriers and leaving ---------------------------------------------------------------------------------

def test_a_barrier_opens_when_all_have_entered():
    table = welcomed()
    table.say(b"A", m.BarrierEnter(rank=0, sequence=1), m.BarrierEnter(rank=1, sequence=1),
              m.BarrierEnter(rank=1, sequence=1))
    table.say(b"B", m.BarrierEnter(rank=2, sequence=1))
    assert not table.got(b"A", m.BarrierDone)
    table.say(b"B", m.BarrierEnter(rank=3, sequence=1))
    assert all(table.got(sender, m.BarrierDone) == [m.BarrierDone(sequence=1)] for sender in ALL)
    table.say(b"B", m.BarrierEnter(rank=3, sequence=1))
    assert not table.got(b"B", m.BarrierDone)


def test_finish_when_all_ranks_have_left():
    table = welcomed()
    table.say(b"A", m.RankLeft(rank=0), m.RankLeft(rank=1), m.RankLeft(rank=1))
    table.say(b"B", m.RankLeft(rank=2))
    assert not table.job.over
    table.say(b"B", m.RankLeft(rank=3))
    assert table.job.finished and all(table.got(sender, m.Finish) == [m.Finish()] for sender in ALL)
    table.say(b"A", m.Lost(who="rank 2", reason="exited"))
    table.post(table.job.unreachable(1.0, b"A"))
    table.tick(1000.0)
    assert table.job.aborted is None and table.job.finished and not table.job.is_known_to_be_over
    table.post(table.job.finish_again(b"A2", 0))
    assert table.got(b"A2", m.Finish)
    table.say(b"A", m.FinishAck())  # whose connection is gone; it counts as the new one
    for sender in (b"A2", *(each for each in ALL if each != b"A")):
        assert not table.job.is_known_to_be_over
        table.say(sender, m.FinishAck())
    assert table.job.is_known_to_be_over


def test_a_heartbeat_that_asks_for_the_time_gets_it():
    table = welcomed()
    table.now = 7.5
    table.say(b"A", m.Heartbeat(sequence=1, sent_ns=123))
    table.say(b"B", m.Heartbeat(sequence=1))
    assert table.got(b"A", m.Echo) == [m.Echo(sent_ns=123, there_ns=7_500_000_000)]
    assert table.got(b"B", m.Echo) == []


def retire(table, *ranks, units=(0,)):
    for rank in ranks:
        table.say(b"A" if rank < 2 else b"B", m.Retire(rank=rank, units=units))


def test_units_are_retired_once_all_ranks_have_retired_them():
    table = committed("a", "b")
    retire(table, 0, 1, 2)
    assert not table.got(b"H", m.Retired)
    retire(table, 3)
    for sender in ALL:
        assert table.got(sender, m.Retired) == [m.Retired(units=(0,))]
    retire(table, 0)
    assert table.job.aborted.error == "ProtocolError" and "rank 0" in table.job.aborted.reason


def test_a_name_that_not_all_have_retired_waits_to_be_declared_again():
    table = committed("a")
    retire(table, 0)
    table.say(b"A", m.Declare(rank=0, tensors=(spec("a", shape=(7,)),)))
    retire(table, 1, 2, 3)
    for sender, rank in ((b"A", 1), (b"B", 2), (b"B", 3)):
        assert not table.got(b"A", m.Plan)
        table.say(sender, m.Declare(rank=rank, tensors=(spec("a", shape=(7,)),)))
    (plan,) = table.got(b"A", m.Plan)
    assert plan.units[0].members[0].shape == (7,) and not table.got(b"A", m.DeclareFailed)


def test_credit_reaches_helpers_too():
    table = committed("a")
    table.say(b"A", m.Credit(rank=0, nbytes=5000))
    for sender in ALL:
        assert table.got(sender, m.CreditChanged) == [m.CreditChanged(nbytes=5000)]
