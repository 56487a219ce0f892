"""After a loss: the keys of the lost machine move, and no more of the others' than the new optimum forces."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.placement.assignment import assign, machine_times_s, owned_by, step_time_s
from bpsfast.orchestration.placement.rebalancing import reassign
from bpsfast.orchestration.placement.shares import Machine, capacities, optimal_shares

PART = 4096000
machines_with = st.tuples(st.floats(0.5, 100.0), st.one_of(st.just(0.0), st.floats(0.5, 300.0)))


def placed(machines, sizes):
    return list(zip(sizes, assign(sizes, machines)))


@settings(max_examples=300, deadline=None)
@given(st.lists(machines_with, min_size=2, max_size=8), st.lists(machines_with, max_size=6),
       st.lists(st.integers(1, PART), min_size=1, max_size=80), st.data())
def test_at_most_the_lost_share_and_what_the_optimum_forces_is_moved(workers, helpers, sizes, data):
    machines = [Machine(True, *each) for each in workers] + [Machine(False, *each) for each in helpers]
    lost = data.draw(st.integers(0, len(machines) - 1))
    before = placed(machines, sizes)
    after = reassign(before, machines, lost)
    assert after == reassign(before, machines, lost) and lost not in after

    survivors = [machine for m, machine in enumerate(machines) if m != lost]
    best = optimal_shares(survivors, sum(sizes))
    owned = owned_by(before, len(machines))
    kept = owned[:lost] + owned[lost + 1:]
    forced = sum(max(0.0, have - most) for have, most in zip(kept, capacities(survivors, sum(sizes), best.time_s)))
    moved = sum(nbytes for (nbytes, owner), new in zip(before, after) if new != owner)
    assert moved <= owned[lost] + forced + 1e-6 * sum(sizes)


@settings(max_examples=200, deadline=None)
@given(st.lists(machines_with, min_size=3, max_size=8), st.lists(machines_with, max_size=6),
       st.lists(st.integers(1, PART), min_size=1, max_size=80), st.data())
def test_what_is_left_is_near_the_new_optimum(workers, helpers, sizes, data):
    machines = [Machine(True, *each) for each in workers] + [Machine(False, *each) for each in helpers]
    lost = data.draw(st.integers(0, len(machines) - 1))
    survivors = [machine for m, machine in enumerate(machines) if m != lost]
    after = [m - (m > lost) for m in reassign(placed(machines, sizes), machines, lost)]
    n = sum(machine.has_ranks for machine in survivors)
    dearest = max(max((n if not machine.has_ranks else n - 2) * max(sizes) / machine.rate,
                      n * max(sizes) / machine.sum_rate if machine.sum_rate else 0.0) for machine in survivors)
    best = optimal_shares(survivors, sum(sizes)).time_s
    assert step_time_s(zip(sizes, after), survivors) <= (best + dearest) * 1.015 + 1e-6


def test_a_lost_helper_of_equal_machines_moves_its_own_keys_only():
    machines = [Machine(True, 1.0)] * 8 + [Machine(False, 1.0)] * 4
    before = placed(machines, [1000] * 2000)
    after = reassign(before, machines, 11)
    assert [new for (_, owner), new in zip(before, after) if owner != 11] == [o for _, o in before if o != 11]
    survivors = machines[:11]
    assert step_time_s(zip([1000] * 2000, after), survivors) <= 1.015 * optimal_shares(survivors, 2e6).time_s


def test_a_lost_worker_may_force_others_to_give_up_keys():
    # it set the time alone: without it the step is shorter than what the others own allows
    machines = [Machine(True, 10.0)] * 3 + [Machine(True, 1.0)] + [Machine(False, 10.0)] * 2
    before = placed(machines, [1000] * 3000)
    after = reassign(before, machines, 3)
    survivors = machines[:3] + machines[4:]
    own = owned_by(((1000, m - (m > 3)) for m in after), 5)
    assert max(machine_times_s(own, survivors)) <= 1.015 * optimal_shares(survivors, 3e6).time_s


def test_the_last_worker_owns_everything():
    machines = [Machine(True, 1.0), Machine(True, 1.0), Machine(False, 1.0)]
    assert set(reassign(placed(machines, [1000] * 30), machines, 0)) == {1}


def test_other_policies_keep_their_promise():
    machines = [Machine(True, 1.0)] * 3 + [Machine(False, 1.0)] * 3
    sizes = [1000] * 60
    before = list(zip(sizes, assign(sizes, machines, "ps")))
    assert set(reassign(before, machines, 4, "ps")) == {3, 5}


@pytest.mark.parametrize(("lost", "words"), [(7, "machine 7 cannot be lost: there are 3"), (-1, "cannot be lost")])
def test_nobody_else_can_be_lost(lost, words):
    with pytest.raises(ConfigError, match=words):
        reassign([(1, 0)], [Machine(True)] * 3, lost)


def test_without_ranks_nothing_is_left():
    with pytest.raises(ConfigError, match="last with ranks"):
        reassign([(1, 1)], [Machine(True), Machine(False)], 0)
