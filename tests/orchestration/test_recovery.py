"""A helper is lost: what the scheduler asks of whom, who sums from then on, and which round is kept. Tables."""
from __future__ import annotations

import pytest

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.errors import PeerLostError, ProtocolError
from bpsfast.orchestration.job.recovery import EpochChange
from bpsfast.orchestration.messages import FreezeReport, NodeInfo, OwnerChange, PartPlan, UnitPlan
from bpsfast.orchestration.placement.assignment import step_time_s
from bpsfast.orchestration.placement.shares import Machine, optimal_shares
from tests.support.job_table import spec
from tests.support.lossy_table import WORKERS, LossyTable

LAST = (1 << 32) - 1


def node(index, ranks=()):
    return NodeInfo(index=index, host="h", pid=1, address="", shm_name="", ranks=ranks, nic_rate_bytes=0.0)


#: Three machines with ranks and two helpers, of which node 3 is lost.
NODES = (node(0, (0, 1)), node(1, (2,)), node(2, (3,)), node(3), node(4))


def unit(ranks=(), codec=None, part=7, owner=3):
    return UnitPlan(unit=0, name="w", dtype="float32", average=False, priority=0, nbytes=4096, stride=4096, members=(),
                    parts=(PartPlan(part=part, offset=0, nbytes=4096, owner=owner),), ranks=ranks, codec=codec)


def move(done, near=None, n_helpers=1, unfinished=None, **fields):
    """The move of partition 7, of which *done* says by node (passed on, complete[, place])."""
    survivors = (0, 1, 2, 4)[:3 + n_helpers]
    recovery = EpochChange(2, {3} if n_helpers else {3, 4}, survivors, "why", 60.0)
    for index in survivors:
        progress = ((7, *done[index], *([index] if len(done[index]) == 2 else [])),) if index in done else ()
        recovery.frozen(index, FreezeReport(epoch=2, progress=progress, near=(near or {}).get(index, ())))
    found = recovery.moves_of_lost([unit(**fields)], NODES, unfinished or {})
    return found[0] if found else None


@pytest.mark.parametrize(("done", "kept", "lacking", "candidates"), [
    ({0: (5, 5), 1: (5, 5), 2: (5, 5)}, 5, (), [0, 1, 2, 4]),  # between two rounds
    ({0: (6, 5), 1: (5, 5), 2: (6, 5)}, 5, (), [0, 1, 2, 4]),  # begun: who has passed it on does so again
    ({0: (6, 5), 1: (6, 5), 2: (6, 5)}, 5, (), [0, 1, 2, 4]),  # summed perhaps, but nobody has it
    ({0: (6, 6), 1: (6, 5), 2: (6, 5)}, 6, (1, 2), [0, 4]),  # one has it
    ({0: (6, 5), 1: (7, 6), 2: (6, 6)}, 6, (0,), [1, 2, 4]),  # and begins the next one
    ({0: (0, 0), 1: (LAST, LAST), 2: (0, LAST)}, 0, (1, 2), None),  # rounds wrap around: somebody contradicts
    ({0: (0, 0), 1: (0, LAST), 2: (1, 0)}, 0, (1,), [0, 2, 4]),
    ({0: (0, LAST), 1: (LAST, LAST), 2: (0, LAST)}, LAST, (), [0, 1, 2, 4]),
    ({0: (1 << 31, (1 << 31) - 1), 1: (1 << 31, 1 << 31), 2: ((1 << 31) + 1, 1 << 31)}, 1 << 31, (0,), [1, 2, 4]),
])
def test_the_latest_round_that_is_complete_anywhere_is_kept(done, kept, lacking, candidates):
    if candidates is None:
        with pytest.raises(ProtocolError, match="node 1 has passed on round 4294967295"):
            move(done)
        return
    found = move(done)
    assert (found.kept_round, found.lacking, found.candidates) == (kept, lacking, candidates)
    holders = [index for index in done if index not in lacking]
    assert found.keeper in holders if lacking else found.keeper == -1
    change = found.owner_change(4)
    assert (change.part, change.owner, change.kept_round) == (7, 4, kept)


@pytest.mark.parametrize(("done", "words"), [
    ({0: (5, 5), 1: (5, 3), 2: (5, 5)}, "node 1 has passed on round 5 of partition 7 of 'w' and has round 3, but"),
    ({0: (5, 5), 1: (7, 5), 2: (5, 5)}, "node 1 has passed on round 7"),
    ({0: (5, 5), 1: (4, 4), 2: (5, 5)}, "node 1 has passed on round 4"),  # how was 5 summed without it?
    ({0: (5, 5), 1: (6, 4), 2: (5, 5)}, "node 1 has passed on round 6"),  # before it had round 5
    ({0: (5, 5), 2: (5, 5)}, r"nodes \[1\] say nothing of partition 7 of 'w', which their ranks push"),
])
def test_reports_that_cannot_be_are_a_protocol_error(done, words):
    with pytest.raises(ProtocolError, match=words):
        move(done)


def test_only_those_whose_ranks_push_a_unit_count():
    found = move({0: (5, 5), 2: (6, 5)}, ranks=(0, 3))
    assert (found.candidates, found.kept_round) == ([0, 2, 4], 5)
    assert move({0: (5, 5), 1: (5, 5), 2: (5, 5)}, owner=4) is None, "its owner is not lost"


def test_who_read_the_result_in_the_lost_owners_memory_has_it_in_place():
    """Nodes 0 and 1 share a host with the lost owner, 2 does not."""
    near = {0: (1, 3), 1: (0, 3)}
    found = move({0: (6, 6, 3), 1: (6, 5, 3), 2: (6, 5)}, near)
    assert (found.kept_round, found.lacking, found.keeper) == (6, (2,), 0)
    assert found.candidates == [0, 4], "both hosts are reached from either"
    found = move({0: (6, 5, 3), 1: (6, 5, 3), 2: (6, 6)}, near)
    assert (found.kept_round, found.lacking, found.candidates) == (6, (), [2, 4])


def test_who_reads_where_a_holder_reads_has_the_result_in_place():
    """What node 3 had written into the memory of a helper that was lost before, nodes 0 and 1 read there both."""
    found = move({0: (6, 6, 9), 1: (6, 5, 9), 2: (6, 6)}, {0: (1, 9), 1: (0, 9)})
    assert (found.lacking, found.keeper) == ((), -1)


def test_a_result_is_lent_over_a_wire_only():
    near = {0: (1,), 1: (0,)}
    found = move({0: (6, 6), 1: (6, 5), 2: (6, 6)}, near)
    assert (found.lacking, found.keeper) == ((1,), 2)
    with pytest.raises(PeerLostError, match=r"the result of round 6 .* cannot reach nodes \[1\] from nodes \[0\]"):
        move({0: (6, 6), 1: (6, 5)}, near, ranks=(0, 1, 2))


@pytest.mark.parametrize(("before", "lent"), [
    (OwnerChange(part=7, owner=4, kept_round=6, keeper=2, lacking=(0, 1)), True),
    (OwnerChange(part=7, owner=4, kept_round=6, keeper=2, lacking=(0, 1), lent=True), True),
    (OwnerChange(part=7, owner=4, kept_round=5, keeper=2, lacking=(0, 1)), False),  # that one has arrived
])
def test_what_is_lent_already_is_not_sent_again(before, lent):
    """Node 1 has got it meanwhile; a second one for node 0 would come when round 8 lies there."""
    found = move({0: (6, 5), 1: (6, 6), 2: (7, 6)}, unfinished={7: before}).owner_change(1)
    assert (found.kept_round, found.lacking, found.lent) == (6, (0,), lent)
    assert found.keeper == 2 if lent else found.keeper in (1, 2)


def test_a_member_owns_only_what_all_can_read_where_they_do():
    apart = {0: (1,), 1: (0,)}  # on one host, where each reads in its own memory what came from on the device
    found = move({0: (5, 5), 1: (5, 5), 2: (5, 5)}, apart)
    assert found.candidates == [2, 4]
    with pytest.raises(PeerLostError, match="nobody can go on with partition 7 of 'w'"):
        move({0: (5, 5), 1: (5, 5)}, apart, n_helpers=0, ranks=(0, 1, 2))


def test_a_helper_owns_nothing_for_nodes_that_it_shares_memory_with():
    assert move({0: (5, 5), 1: (5, 5), 2: (5, 5)}, {0: (4,)}).candidates == [0, 1, 2]


def test_what_is_compressed_goes_to_a_helper_or_ends_the_job():
    codec = CodecSpec(kind="onebit")
    done = {0: (5, 5), 1: (5, 5), 2: (6, 5)}
    assert move(done, codec=codec).candidates == [4]
    with pytest.raises(PeerLostError, match=r"partition 7 of 'w' \(it is compressed, and no helper is left\)"):
        move(done, codec=codec, n_helpers=0)


def test_late_words_are_ignored():
    recovery = EpochChange(3, {3}, (0, 1), "why", 60.0)
    assert not recovery.frozen(0, FreezeReport(epoch=2)) and recovery.missing == [0, 1]
    assert not recovery.frozen(0, FreezeReport(epoch=3)) and not recovery.ready(1, 0) and recovery.missing == [1]
    assert recovery.frozen(1, FreezeReport(epoch=3))
    recovery.generation = 9
    assert not recovery.frozen(0, FreezeReport(epoch=3)), "they are counted once"
    assert not recovery.ready(0, 8) and recovery.missing == [0, 1]
    assert not recovery.ready(0, 9) and recovery.ready(1, 9) and recovery.missing == []


# -- who owns what from then on -------------------------------------------------------------------------------

@pytest.mark.parametrize(("placement", "owners"), [("optimal", {0, 1, 3}), ("ps", {3}), ("colocated", {0, 1})])
def test_new_owners_are_those_that_the_policy_would_take(placement, owners):
    table = LossyTable("ps" if placement == "ps" else "optimal").commit()
    table.job._generations._policy = placement  # a helper owns nothing under "colocated": nothing could be lost
    table.lose(b"H")
    table.frozen(table.everywhere(table.owned[2]))
    recover = table.recover()
    assert {each.part for each in recover.owner_changes} == set(table.owned[2])
    assert {each.owner for each in recover.owner_changes} <= owners
    owner_of = {each.part: each.owner for each in recover.owner_changes}
    for part in recover.units[0].parts:
        assert part.owner == owner_of.get(part.part, part.owner) != 2, "and all others keep theirs"


def test_without_helpers_those_who_are_left_sum():
    table = LossyTable("ps").commit()
    for epoch, (sender, index) in enumerate(((b"H", 2), (b"I", 3)), 2):
        lost = [part for part, owner in owners(table).items() if owner == index]
        table.lose(sender)
        table.frozen(table.everywhere(lost), epoch=epoch)
        table.ready(table.recover().generation)
    assert set(owners(table).values()) == {0, 1}


def owners(table):
    return {part.part: part.owner for unit in table.job._generations.units for part in unit.parts}


def test_a_helper_takes_over_no_more_than_it_has_memory_for():
    table = LossyTable("ps", joins={b"I": {"room_nbytes": 4 * 8 * 4096}})
    table.commit(ownable_nbytes=-1)
    table.say(b"I", m.MemoryFreed(ownable_nbytes=4096))
    table.lose(b"H")
    table.frozen({sender: [(part, 5, 5, index) for part in table.owned[2]] for index, sender in enumerate(WORKERS)})
    taken = [each.owner for each in table.recover().owner_changes]
    assert len(taken) == 4
    assert taken.count(3) == 1, "the policy yields before the job ends"


def test_no_step_takes_longer_than_it_has_to():
    table = LossyTable("optimal").commit(spec("w", shape=(64 * 1024,)))
    table.lose(b"H")
    table.frozen(table.everywhere(table.owned[2]))
    table.ready(table.recover().generation)
    machines = [Machine(True, 1.0), Machine(True, 1.0), Machine(False, 1e-9), Machine(False, 1.0)]
    found = step_time_s([(4096, owner) for owner in owners(table).values()], machines)
    assert found == optimal_shares([*machines[:2], machines[3]], 64 * 4096).time_s
