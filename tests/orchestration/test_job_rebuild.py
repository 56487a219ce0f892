"""A scheduler without a memory: when it knows enough, whom it believes, and what thousands of nodes cost it."""
from __future__ import annotations

import time

import msgspec
import pytest

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.errors import PeerLostError
from bpsfast.orchestration.failover.control_log import ControlLog
from bpsfast.orchestration.failover.job_rebuild import JobRebuild
from bpsfast.orchestration.failover.state_merge import NodeReport, NodeReports
from tests.support.job_table import Table, join

SETTINGS = {"transport": "tcp"}


def reports(n_workers, n_helpers=0):
    """What each node of a job has to say, by index."""
    table = Table(num_nodes=n_workers, num_helpers=n_helpers, name="this job")
    n_nodes = n_workers + n_helpers
    for index in range(n_nodes):
        table.say(b"%d" % index, join(f"h{index}", int(index < n_workers)))
    said = []
    for index in range(n_nodes):
        control_log = ControlLog("1.0", SETTINGS)
        for message in table.inbox[b"%d" % index]:
            control_log.heard(message)
        said.append(list(control_log.report()))
    return said


def begin(**fields):
    return JobRebuild(**{"package": "", "heartbeat_s": 1.0, "lease_s": 10.0, "timeout_s": 60.0, "now": 0.0, **fields})


def tell(rebuilding, index, said, now=0.0, sender=None):
    return [answer for message in said
            for answer in rebuilding.receive(now, sender or b"%d" % index, message)]


def test_the_job_of_thousands_is_rebuilt_in_moments():
    """Time grows with their number, but for a little: with its cube these would take minutes."""
    said = reports(1000, 500)
    rebuilding = begin()
    begun = time.monotonic()
    for index, each in enumerate(said):
        for message in each:
            rebuilding.receive(0.0, b"%d" % index, message)
            if rebuilding.is_due:
                rebuilding.is_due = False
                assert not rebuilding.finished
                snapshot = rebuilding.snapshot(0.0)
        assert (snapshot is not None) == (index == len(said) - 1)
    assert time.monotonic() - begun < 20.0
    assert snapshot.roster.senders == [b"%d" % index for index in range(1500)]


def test_heartbeats_go_to_all_and_a_lease_begins_with_the_majority():
    said = reports(3, 1)
    rebuilding = begin()
    tell(rebuilding, 0, said[0])
    assert rebuilding.tick(1.0) == [(b"0", m.Heartbeat(sequence=1, is_short=True))] and not rebuilding.tick(1.5)
    tell(rebuilding, 1, said[1], 30.0)
    tell(rebuilding, 2, said[2], 30.0)
    assert rebuilding.snapshot(30.0) is None and rebuilding.snapshot(39.9) is None
    assert list(rebuilding.snapshot(40.0).absent) == [3]


def test_who_is_heard_and_has_not_told_all_is_waited_for():
    said = reports(1, 1)
    rebuilding = begin()
    tell(rebuilding, 0, said[0])
    tell(rebuilding, 1, said[1][:1])
    for now in (5.0, 10.0, 15.0):
        rebuilding.tick(now)
        rebuilding.receive(now, b"1", m.Heartbeat(sequence=1))
        assert rebuilding.snapshot(now) is None
    assert list(rebuilding.snapshot(25.0).absent) == [1]


def test_a_scheduler_that_was_stopped_waits_as_long_as_if_it_had_not_been():
    said = reports(1, 1)
    rebuilding = begin()
    tell(rebuilding, 0, said[0])
    rebuilding.snapshot(0.0)
    rebuilding.tick(1000.0)
    assert rebuilding.aborted is None and rebuilding.snapshot(1000.0) is None
    rebuilding.tick(1004.0)
    rebuilding.tick(1008.0)
    rebuilding.tick(1009.9)
    assert rebuilding.snapshot(1009.9) is None and rebuilding.snapshot(1010.0) is not None


def test_the_deadline_names_who_is_missing():
    said = reports(4)
    rebuilding = begin(timeout_s=10.0)
    tell(rebuilding, 2, said[2])
    for now in range(1, 11):
        assert rebuilding.aborted is None
        rebuilding.tick(float(now))
    assert "missing node 0 (host h0, rank 0); node 1 (host h1, rank 1); node 3" in str(rebuilding.aborted)


def test_a_node_that_dials_anew_has_one_account():
    said = reports(2)
    rebuilding = begin()
    tell(rebuilding, 0, said[0])
    tell(rebuilding, 0, said[0], sender=b"0 again")
    tell(rebuilding, 1, said[1])
    rebuilding.unreachable(b"0")
    snapshot = rebuilding.snapshot(0.0)
    assert snapshot.roster.senders == [b"0 again", b"1"] and rebuilding.reporting == [b"0 again", b"1"]
    rebuilding.unreachable(b"1")
    assert rebuilding.snapshot(0.0) is None or rebuilding.snapshot(0.0).absent


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"version": 1}, "MismatchError", "(protocol 1), the scheduler"),
    ({"index": 3}, "ProtocolError", "says that it is node 3 of 3"),
    ({"settings": {"transport": "shm"}}, "MismatchError", "transport differs: shm on node 1 (host h1, rank 1), tcp"),
    ({"settings": {}}, "MismatchError", "setting transport differs: (not sent) on node 1 (host h1, rank 1), tcp"),
    ({"job": "that job"}, "PeerLostError", "another one (job this job, of 3 nodes, not that job)"),
])
def test_who_is_refused_is_told_why(change, error, words):
    said = reports(3)
    rebuilding = begin()
    tell(rebuilding, 0, said[0])
    ((sender, refuse),) = tell(rebuilding, 1, [msgspec.structs.replace(said[1][0], **change), *said[1][1:]])
    assert sender == b"1" and refuse.error == error and words in refuse.reason
    assert rebuilding.reporting == [b"0"]


@pytest.mark.parametrize(("half", "decides"), [((0, 1), True), ((0, 3), True), ((2, 3), False), ((1, 2, 3), True)])
def test_of_two_schedulers_that_each_hear_half_one_decides(half, decides):
    """It ends the job, for the others do not come; the other one waits."""
    said = reports(4, 1)
    rebuilding = begin()
    for index in (*half, 4):
        tell(rebuilding, index, said[index])
    assert rebuilding.snapshot(0.0) is None and rebuilding.is_alive == decides
    if decides:
        with pytest.raises(PeerLostError, match="did not come back within lease_s = 10 s"):
            rebuilding.snapshot(10.0)
    else:
        assert rebuilding.snapshot(59.0) is None


def test_a_dead_machine_does_not_keep_a_job_that_goes_on_without_it():
    """Of two machines the first one is lost with the scheduler: the other one has no majority, but its port refuses."""
    said = reports(2)
    rebuilding = begin(min_workers=1)
    tell(rebuilding, 1, said[1])
    assert rebuilding.snapshot(0.0) is None
    assert any(isinstance(message, m.ProbeRequest) for now in (4.0, 8.0) for _, message in rebuilding.tick(now))
    rebuilding.receive(10.5, b"1", m.ProbeResult(node=0, outcome="silent"))
    assert rebuilding.snapshot(10.5) is None, "it may be behind a network that is cut"
    rebuilding.receive(11.0, b"1", m.ProbeResult(node=0, outcome="refused"))
    snapshot = rebuilding.snapshot(11.0)
    assert snapshot is not None and list(snapshot.absent) == [0] and snapshot.lost_ranks == {0}
    without = begin()
    tell(without, 1, said[1])
    without.receive(11.0, b"1", m.ProbeResult(node=0, outcome="refused"))
    assert without.snapshot(11.0) is None


def test_settings_are_those_of_the_scheduler_where_it_knows_them():
    said = reports(1)
    ((_, refuse),) = tell(begin(fingerprint={"transport": "rdma"}), 0, said[0])
    assert refuse.error == "MismatchError" and "tcp on node 0 (host h0, rank 0), rdma where" in refuse.reason
    assert not tell(begin(fingerprint=SETTINGS), 0, said[0])


def test_an_account_that_is_cut_short_is_not_believed():
    said = reports(1)[0]
    rebuilding = begin()
    tell(rebuilding, 0, [msgspec.structs.replace(said[0], n_units=2), *said[1:]])
    assert "node 0 (host h0, rank 0) has 2 committed units, and has told 0" in str(rebuilding.aborted)


def test_a_scheduler_that_is_replaced_gives_up_earlier_and_only_without_a_majority():
    said = reports(3)
    rebuilding = begin(short_s=30.0)
    tell(rebuilding, 0, said[0])
    tell(rebuilding, 1, said[1], 20.0)
    for now in range(21, 60):
        rebuilding.tick(float(now))
        assert rebuilding.aborted is None, "two of three report, the third may come"
    rebuilding = begin(short_s=30.0)
    tell(rebuilding, 0, said[0])
    for now in range(1, 31):
        assert rebuilding.aborted is None
        rebuilding.tick(float(now))
    assert "has not heard a majority of the nodes with ranks for 30 s: missing node 1" in str(rebuilding.aborted)


def test_losses_that_are_not_committed_make_a_majority_no_smaller():
    """The scheduler before has begun to go on without one of three, and another one does not come."""
    said = reports(3)
    for index in (0, 1):
        said[index][0] = msgspec.structs.replace(said[index][0], epoch=2, lost=(2,), lost_ranks=(2,), frozen=True)
    rebuilding = begin(min_workers=1)
    tell(rebuilding, 1, said[1])
    for now in range(1, 30):
        rebuilding.tick(float(now))
        assert rebuilding.snapshot(float(now)) is None
    tell(rebuilding, 0, said[0], 30.0)
    assert rebuilding.snapshot(30.0).lost == {2}


def test_a_node_that_was_dropped_and_is_proven_dead_is_not_waited_for():
    """Of two, the second one is left, with the word of the scheduler before that the first is lost."""
    said = reports(2)
    said[1][0] = msgspec.structs.replace(said[1][0], epoch=2, lost=(0,), lost_ranks=(0,), frozen=True)
    rebuilding = begin(min_workers=1)
    tell(rebuilding, 1, said[1])
    asked = []
    for now in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        asked += [message for _, message in rebuilding.tick(now) if isinstance(message, m.ProbeRequest)]
        assert rebuilding.snapshot(now) is None or now >= 1.5
        rebuilding.receive(now, b"1", m.ProbeResult(node=0, outcome="refused"))
    assert asked and set(asked) == {m.ProbeRequest(node=0)}
    assert rebuilding.snapshot(3.0).lost == {0}


def test_a_dead_node_does_not_count_while_another_one_may_live():
    """It may have been ready at another scheduler, with that one, before it died."""
    said = reports(4)
    rebuilding = begin(min_workers=1)
    for index in (2, 3):
        tell(rebuilding, index, said[index])
    for now in range(1, 40):
        rebuilding.tick(float(now))
        rebuilding.receive(float(now), b"2", m.ProbeResult(node=0, outcome="refused"))
        assert rebuilding.snapshot(float(now)) is None
    for now in range(40, 45):
        rebuilding.receive(float(now), b"2", m.ProbeResult(node=0, outcome="refused"))
        rebuilding.receive(float(now), b"2", m.ProbeResult(node=1, outcome="refused"))
        snapshot = rebuilding.snapshot(float(now))
    assert snapshot.lost == {0, 1}


def test_who_must_report_is_found_anew_only_if_a_later_epoch_is_reported():
    """It is asked with each message: thousands of nodes report, and most know the same epoch."""
    said = reports(3)
    told = NodeReports()
    assert not told.voters
    told.begin(b"0", NodeReport(said[0][0]))
    first = told.voters
    assert first == {0, 1, 2}
    told.begin(b"1", NodeReport(said[1][0]))
    assert told.voters is first
    told.begin(b"2", NodeReport(msgspec.structs.replace(said[2][0], settled_epoch=2, settled_lost=(0,))))
    second = told.voters
    assert second == {1, 2}
    told.drop(b"2")
    told.begin(b"0", NodeReport(said[0][0]))
    assert told.voters is second, "that epoch was committed, whoever still says so"


def calling_lost(said, lost, **fields):
    """What a node says that has read of the loss of nodes *lost*, one rank each."""
    fields = {"epoch": 2, "lost": lost, "lost_ranks": lost, "frozen": True, **fields}
    return [msgspec.structs.replace(said[0], **fields), *said[1:]]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_a_node_that_a_committed_epoch_is_without_is_not_believed(order):
    said = reports(5)
    said[0] = calling_lost(said[0], (2, 3))
    for index in (1, 2, 3):
        said[index] = calling_lost(said[index], (0, 4), frozen=False, settled_epoch=2, settled_lost=(0, 4))
    rebuilding = begin(min_workers=1)
    told = [each for index in order for each in tell(rebuilding, index, said[index])]
    assert [sender for sender, _ in told] == [b"0"] and "goes on without this node" in told[0][1].reason
    snapshot = rebuilding.snapshot(0.0)
    assert snapshot.lost == {0, 4} and snapshot.lost_ranks == {0, 4} and not snapshot.frozen


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_of_losses_that_exclude_each_other_those_count_with_which_a_majority_goes_on(order):
    said = reports(5)
    said[0] = calling_lost(said[0], (2, 3), epoch=3)
    said[1] = calling_lost(said[1], (0, 4))
    rebuilding = begin(min_workers=1)
    assert not [each for index in order for each in tell(rebuilding, index, said[index])], "a report may change it"
    snapshot = rebuilding.snapshot(0.0)
    assert snapshot.lost == {0, 4} and snapshot.frozen and b"0" not in snapshot.roster.senders


def test_a_loss_that_some_have_not_read_of_is_told_them():
    said = reports(3)
    said[0] = calling_lost(said[0], (1,))
    rebuilding = begin(min_workers=1)
    for index in (1, 2):
        tell(rebuilding, index, said[index])
    assert rebuilding.snapshot(9.0) is None
    tell(rebuilding, 0, said[0], 9.0)
    snapshot = rebuilding.snapshot(9.0)
    assert snapshot.lost == {1} and snapshot.frozen
