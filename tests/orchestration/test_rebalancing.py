"""What newcomers are given: only what can move, never to make a step longer, and until it is not shorter."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.placement.assignment import assign, machine_times_s, owned_by
from bpsfast.orchestration.placement.rebalancing import shared
from bpsfast.orchestration.placement.shares import Machine, optimal_shares


@st.composite
def jobs(draw):
    """Machines, of which the last ones are newcomers, and partitions that the others own."""
    rates = st.sampled_from([1.0, 1.0, 2.0, 5.0])
    n_workers, n_helpers, n_new = (draw(st.integers(*bounds)) for bounds in ((1, 5), (0, 4), (1, 3)))
    machines = [Machine(m < n_workers, draw(rates)) for m in range(n_workers + n_helpers + n_new)]
    machines = [*machines[:-1], machines[-1]._replace(most_nbytes=draw(st.sampled_from([None, 0.0, 150.0])))]
    sizes = draw(st.lists(st.sampled_from([1, 10, 64, 64, 64, 100]), min_size=1, max_size=60))
    policy = draw(st.sampled_from(["optimal", "ps", "colocated", "hash:djb2"]))
    old = n_workers + n_helpers
    place = "ps" if policy == "ps" and n_helpers else "optimal"
    owners = assign(sizes, machines[:old], place)
    newcomers = tuple(range(old, len(machines)))
    can = [draw(st.sampled_from([(), newcomers, newcomers, newcomers[:1]])) for _ in sizes]
    return machines, sizes, owners, can, policy


@settings(max_examples=400, deadline=None)
@given(jobs())
def test_what_moves_and_what_it_brings(job):
    machines, sizes, owners, can, policy = job
    movable = [p for p in range(len(sizes)) if can[p]]
    owned = owned_by(zip(sizes, owners), len(machines))

    def share():
        return shared([sizes[p] for p in movable], [owners[p] for p in movable], [can[p] for p in movable], machines,
                      owned, policy)

    found = list(owners)
    for p, owner in zip(movable, share()):
        assert owner == owners[p] or owner in can[p]
        found[p] = owner
    assert share() == [found[p] for p in movable], "the same answer on any machine"
    then = owned_by(zip(sizes, found), len(machines))
    before_s, after_s = machine_times_s(owned, machines), machine_times_s(then, machines)
    assert all(have <= machine.limit_nbytes for have, machine in zip(then, machines))
    if policy == "colocated":
        assert found == owners
    if policy != "ps":  # there workers give all
        assert max(after_s) <= max(before_s)
    if policy in ("optimal", "ps"):
        assert_nothing_more_helps(machines, sizes, found, can, then, after_s, policy)


def assert_nothing_more_helps(machines, sizes, found, can, own, times_s, policy):
    """No partition that may move makes both who gives and who gets it be done sooner than who is done last is now."""
    last_s = max(times_s)
    for p, owner in enumerate(found):
        if owner in can[p] or (policy == "optimal" and times_s[owner] < last_s):
            continue
        for to in can[p]:
            moved = list(own)
            moved[owner] -= sizes[p]
            moved[to] += sizes[p]
            then_s = machine_times_s(moved, machines)
            others = [m for m, time_s in enumerate(times_s) if time_s == last_s and m != owner]
            if policy == "optimal" and others:
                continue  # they are done last all the same
            assert then_s[owner] >= times_s[owner] or then_s[to] >= times_s[owner], (p, owner, to)


@pytest.mark.parametrize(("n_workers", "n_left", "policy"), [(4, 2, "optimal"), (3, 2, "optimal"), (4, 2, "ps"),
                                                             (2, 2, "ps"), (3, 0, "ps")])
def test_with_many_equal_partitions_the_placement_is_as_good_as_a_new_one(n_workers, n_left, policy):
    """And of a job that has lost all its helpers under "ps", whose workers sum: these give everything."""
    n = n_workers + n_left
    machines = [Machine(m < n_workers) for m in range(n + 2)]
    sizes = [1] * 1200
    owners = assign(sizes, machines[:n], policy if n_left else "colocated")
    found = shared(sizes, owners, [(n, n + 1)] * len(sizes), machines, owned_by(zip(sizes, owners), n + 2), policy)
    time_s = max(machine_times_s(owned_by(zip(sizes, found), n + 2), machines))
    anew_s = max(machine_times_s(owned_by(zip(sizes, assign(sizes, machines, policy)), n + 2), machines))
    assert time_s <= anew_s * 1.01
    if policy == "optimal":
        assert time_s <= optimal_shares(machines, 1200).time_s * 1.01
    if not n_left:
        assert {*found} == {n, n + 1}


def test_who_gives_gives_of_every_stretch():
    """Partitions go out in about this order: no newcomer's card may have nothing to do at first, or at the end."""
    owners = [3] * 40  # one helper had it all
    machines = [Machine(True), Machine(True), Machine(True), Machine(False), Machine(False)]
    found = shared([8] * 40, owners, [(4,)] * 40, machines, owned_by(((8, 3) for _ in owners), 5), "ps")
    assert found.count(4) == 20
    assert all(8 <= found[begin:begin + 20].count(4) <= 12 for begin in range(20))


def test_two_workers_gain_nothing_by_a_helper():
    machines = [Machine(True), Machine(True), Machine(False)]
    owners = assign([10] * 20, machines[:2])
    assert shared([10] * 20, owners, [(2,)] * 20, machines, owned_by(((10, o) for o in owners), 3)) == owners
