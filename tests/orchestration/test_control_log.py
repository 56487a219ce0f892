"""A node's control log: what was answered is not said again, what was not is, as it was said."""
from __future__ import annotations

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.failover.control_log import ControlLog
from bpsfast.orchestration.store import StoreSpec
from tests.support.job_table import ALL, spec, welcomed


def control_logs():
    """A table and the control log of each node: whatever is said at `hear` and `say` is in both."""
    table, found = welcomed(), {}
    for sender in ALL:
        found[sender] = ControlLog("1.0", {"transport": "tcp"})
        for message in table.inbox.pop(sender):
            found[sender].heard(message)
    return table, found


def hear(table, found, *senders):
    for sender in senders or ALL:
        for message in table.inbox.pop(sender, ()):
            found[sender].heard(message)


def say(table, found, sender, *messages):
    for message in messages:
        found[sender].said(message)
        table.say(sender, message)


def commit(table, found, *specs):
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        say(table, found, sender, *(m.Declare(rank=rank, tensors=specs) for rank in ranks))
    hear(table, found)
    number = table.job._generations.number
    for sender in ALL:
        say(table, found, sender, m.Ready(generation=number, ownable_nbytes=7))
    hear(table, found)


def report(control_log, recall=0):
    """Return the head, the units, and what is said besides."""
    head, *rest = control_log.report(recall)
    assert rest.pop() == m.RejoinComplete()
    units = [unit for each in rest if isinstance(each, m.CommittedUnits) for unit in each.units]
    assert head.n_units == len(units)
    return head, units, [each for each in rest if not isinstance(each, m.CommittedUnits)]


def test_what_is_committed_is_told_by_its_units_and_what_is_not_as_it_was_declared():
    table, found = control_logs()
    commit(table, found, spec("a"), spec("b"))
    say(table, found, b"A", m.Declare(rank=1, tensors=(spec("c"), spec("d"))))
    head, units, rest = report(found[b"A"], 5)
    assert units == table.job._generations.units and {unit.name for unit in units} == {"a", "b"}
    assert (head.index, head.recall, head.committed, head.seen, head.prepared) == (0, 5, 1, 1, 0)
    assert head.ownable_nbytes == 7
    assert rest == [m.Declare(rank=1, tensors=(spec("c"), spec("d")))], "of the first rank alone the positions count"
    assert report(found[b"H"])[1:] == (units, [])


def test_a_plan_is_prepared_until_it_is_committed_dropped_or_refused():
    for end, expected in ((m.Resume(), 0), (m.Freeze(epoch=2, lost=(2,), reason="x"), 0),
                          (m.Commit(generation=1, order=()), 0),
                          (m.DeclareFailed(names=("a",), error="CapacityError", reason="x"), 0),
                          (m.DeclareFailed(names=("z",), error="CapacityError", reason="x"), 1)):
        table, found = control_logs()
        for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
            say(table, found, sender, *(m.Declare(rank=rank, tensors=(spec("a"),)) for rank in ranks))
        hear(table, found)
        head, units, _ = report(found[b"B"])
        assert (head.prepared, head.prepared_units, head.next_unit, units) == (1, (0,), 1, [])
        found[b"B"].heard(end)
        assert report(found[b"B"])[0].prepared == expected, end


def test_names_that_failed_are_told_and_not_declared_again():
    table, found = control_logs()
    say(table, found, b"A", m.Declare(rank=0, tensors=(spec("a", dtype="int8"), spec("b"))))
    say(table, found, b"B", m.Declare(rank=2, tensors=(spec("a"),)))
    hear(table, found)
    head, _, rest = report(found[b"A"])
    assert [(name, error) for name, error, _ in head.failed] == [("a", "MismatchError")]
    assert rest == [m.Declare(rank=0, tensors=(spec("b"),), positions=(1,))]


def test_units_that_are_retired_are_forgotten_when_all_have_said_so():
    table, found = control_logs()
    commit(table, found, spec("a"))
    say(table, found, b"A", m.Retire(rank=0, units=(0,)), m.Retire(rank=1, units=(0,)))
    assert report(found[b"A"])[2] == [m.Retire(rank=0, units=(0,)), m.Retire(rank=1, units=(0,))]
    say(table, found, b"B", m.Retire(rank=2, units=(0,)), m.Retire(rank=3, units=(0,)))
    hear(table, found)
    assert report(found[b"A"])[1:] == ([], [])


def test_ranks_that_have_retired_theirs_of_a_store_are_remembered_while_others_have_not():
    table, found = control_logs()
    commit(table, found, spec("a", store=StoreSpec(worker="node"), average=False))
    for rank in (0, 1):
        say(table, found, b"A", m.Retire(rank=rank, units=(0,)))
    hear(table, found)
    head, units, _ = report(found[b"H"])
    assert (head.gone_from, [unit.unit for unit in units]) == (((0, (0, 1)),), [1])


def test_barriers_are_entered_again_unless_they_are_done():
    table, found = control_logs()
    say(table, found, b"A", m.BarrierEnter(rank=0, sequence=1), m.BarrierEnter(rank=1, sequence=1))
    assert len(report(found[b"A"])[2]) == 2
    found[b"A"].heard(m.BarrierDone(sequence=1))
    head, _, rest = report(found[b"A"])
    assert (head.barrier, rest) == (1, [])


def test_questions_are_asked_again_until_they_are_answered_and_notices_stay():
    _, found = control_logs()
    control_log = found[b"A"]
    lookup = m.Lookup(rank=0, question=1, key="k", timeout_s=3.0, who="")
    notice, refused = (m.Publish(rank=0, question=n, key=str(n), value=b"x") for n in (2, 3))
    for message in (lookup, notice, refused):
        control_log.said(message)
    assert report(control_log)[2] == [notice, refused, lookup]
    control_log.heard(m.KeyValueReply(rank=0, question=1))
    control_log.heard(m.KeyValueReply(rank=0, question=2))
    control_log.heard(m.KeyValueReply(rank=0, question=3, error="MismatchError", reason="another's"))
    assert report(control_log)[2] == [notice]
    control_log.said(m.Withdraw(rank=0, prefix="2"))
    assert report(control_log)[2] == []


def test_departures_and_losses_are_said_until_the_job_has_gone_on_without():
    _, found = control_logs()
    control_log = found[b"B"]
    left, lost = m.RankLeft(rank=2), m.Lost(who="node 2", reason="x")
    control_log.said(left)
    control_log.said(lost)
    control_log.record_peer_left(0)
    head, _, rest = report(control_log)
    assert (rest, head.nodes_left, control_log.left) == ([left, lost], (0,), {2})
    control_log.heard(m.Freeze(epoch=2, lost=(2,), reason="x"))
    head, _, rest = report(control_log)
    assert (rest, head.lost, head.frozen, head.epoch) == ([left], (2,), True, 2)


def test_without_whom_an_epoch_was_committed_is_told_and_not_who_is_only_to_be_dropped():
    """The next scheduler needs a majority of the nodes that were committed last."""
    control_log = ControlLog("1.0", {"transport": "tcp"})
    control_log.heard(m.Welcome(index=0, epoch=1, nodes=tuple(welcomed().job.roster.nodes)))
    for epoch, lost in ((2, (1,)), (3, (1, 2))):
        control_log.heard(m.Freeze(epoch=epoch, lost=lost, reason="x"))
        head, *_ = report(control_log)
        assert (head.lost, head.settled_epoch, head.settled_lost) == (lost, epoch - 1, (1,) if epoch == 3 else ())
        control_log.heard(m.Recover(epoch=epoch, generation=epoch, units=(), owner_changes=()))
        assert report(control_log)[0].settled_epoch == epoch - 1
        control_log.heard(m.Commit(generation=epoch, order=()))
        head, *_ = report(control_log)
        assert (head.settled_epoch, head.settled_lost) == (epoch, lost)
