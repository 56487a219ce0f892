"""The optimal shares: the closed form against a linear program and against trees, and the published tables."""
from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.errors import CapacityError, ConfigError
from bpsfast.orchestration.placement.assignment import assign
from bpsfast.orchestration.placement.shares import Machine, optimal_shares


def cluster(workers, helpers=()):
    """Machines with these rates."""
    return [Machine(True, rate) for rate in workers] + [Machine(False, rate) for rate in helpers]


def solve(machines, nbytes):
    """The optimum by linear programming: minimise t over the owned bytes."""
    import numpy as np
    from scipy.optimize import linprog

    n = sum(machine.has_ranks for machine in machines)
    if n == 1:
        return 0.0
    rows, bounds = [], []

    def at_most(m, slope, rate, bound):
        row = np.zeros(len(machines) + 1)
        row[m], row[-1] = slope, -rate
        rows.append(row)
        bounds.append(bound)

    for m, machine in enumerate(machines):
        at_most(m, n - 2 if machine.has_ranks else n, machine.rate, -nbytes if machine.has_ranks else 0.0)
        if machine.sum_rate:
            at_most(m, n, machine.sum_rate, 0.0)
    total = np.ones((1, len(machines) + 1))
    total[0, -1] = 0
    cost = np.zeros(len(machines) + 1)
    cost[-1] = 1
    within = [(0, machine.most_nbytes) for machine in machines]
    result = linprog(cost, A_ub=np.array(rows), b_ub=bounds, A_eq=total, b_eq=[nbytes], bounds=[*within, (0, None)],
                     method="highs")
    assert result.status == 0, result.message
    return result.fun


def check_shares(machines, nbytes):
    """The shares sum up, are not negative, and keep to the time they promise."""
    shares = optimal_shares(machines, nbytes)
    n = sum(machine.has_ranks for machine in machines)
    assert sum(shares.owned) == pytest.approx(nbytes, rel=1e-9)
    assert min(shares.owned) >= 0
    for machine, owned in zip(machines, shares.owned):
        carried = nbytes + (n - 2) * owned if machine.has_ranks else n * owned
        if n > 1:
            assert carried <= machine.rate * shares.time_s * (1 + 1e-9)
        if n > 1 and machine.sum_rate:
            assert n * owned <= machine.sum_rate * shares.time_s * (1 + 1e-9)
        if n > 1:
            assert owned <= machine.limit_nbytes * (1 + 1e-9)
    return shares


rates = st.floats(0.5, 100.0)
sum_rates = st.one_of(st.just(0.0), st.floats(0.05, 300.0))


def instance(draw, nbytes):
    """Random machines; half of the instances have slow sums here and there, half have bounded memory."""
    def rate():
        return draw.choice([1.0, 10.0, 25.0, 100.0, draw.uniform(0.5, 100)])

    with_sums, with_bounds = draw.random() < 0.5, draw.random() < 0.5

    def machine(has_ranks):
        return Machine(has_ranks, rate(), draw.uniform(0.05, 300) if with_sums and draw.random() < 0.5 else 0.0,
                       nbytes * draw.choice([0.0, draw.random()]) if with_bounds and draw.random() < 0.5 else None)

    machines = ([machine(True) for _ in range(draw.randrange(1, 13))]
                + [machine(False) for _ in range(draw.randrange(13))])
    if sum(machine.limit_nbytes for machine in machines) < nbytes:
        machines[0] = machines[0]._replace(most_nbytes=None)
    return machines


@pytest.mark.slow
def test_closed_form_equals_linear_program_on_2000_instances():
    draw = random.Random(20201104)
    for _ in range(2000):
        nbytes = draw.choice([1.0, 548.0])
        machines = instance(draw, nbytes)
        assert check_shares(machines, nbytes).time_s == pytest.approx(solve(machines, nbytes), rel=1e-7, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(rates, sum_rates), min_size=1, max_size=12),
       st.lists(st.tuples(rates, sum_rates), max_size=9))
def test_closed_form_equals_linear_program(workers, helpers):
    machines = [Machine(True, *each) for each in workers] + [Machine(False, *each) for each in helpers]
    assert check_shares(machines, 1.0).time_s == pytest.approx(solve(machines, 1.0), rel=1e-7, abs=1e-12)


def test_a_helper_whose_sums_are_slow_counts_as_one_with_a_slow_nic():
    quota = [Machine(True, 10.0)] * 4 + [Machine(False, 10.0, 3.0)]
    slow = [Machine(True, 10.0)] * 4 + [Machine(False, 3.0)]
    assert optimal_shares(quota, 1.0).time_s == pytest.approx(optimal_shares(slow, 1.0).time_s)


def test_workers_that_cannot_sum_fast_leave_it_to_the_helper():
    machines = [Machine(True, 10.0, 1.0)] * 4 + [Machine(False, 10.0)]
    shares = check_shares(machines, 1.0)
    # 4 workers sum at 1 / 4 each, the helper at 10 / 4: 3.5 t = 1
    assert shares.time_s == pytest.approx(1 / 3.5)
    assert shares.owned[4] == pytest.approx(10 / 14)


def test_what_one_machine_may_not_own_others_take():
    machines = [Machine(True, 10.0)] * 4 + [Machine(False, 10.0, most_nbytes=0.05)]
    shares = check_shares(machines, 1.0)
    # 4 workers own 0.95: (1 + 2 * 0.95 / 4) / 10
    assert shares.time_s == pytest.approx(0.1475) and shares.owned[4] == pytest.approx(0.05)


def test_bounds_that_exactly_suffice_do():
    machines = [Machine(True, 1.0, most_nbytes=0.1)] * 3 + [Machine(False, 1.0, most_nbytes=0.7)]
    assert check_shares(machines, 1.0).time_s == pytest.approx(solve(machines, 1.0))


def test_more_than_all_may_own_is_refused():
    with pytest.raises(CapacityError, match="100 bytes of gradients do not fit: the machines may own 60 bytes"):
        optimal_shares([Machine(True, 1.0, most_nbytes=30)] * 2, 100)


def test_sum_rates_without_nic_rates_are_not_looked_at():
    machines = [Machine(True, 0.0, 1.0)] * 4 + [Machine(False, 0.0, 1e-9)]
    assert optimal_shares(machines, 1.0) == optimal_shares(cluster([1.0] * 4, [1.0]), 1.0)


def tree_loads(draw, n, k):
    """What one element's reduction and broadcast make each machine send and receive: two random trees of messages."""
    sent, received = [0] * (n + k), [0] * (n + k)
    for phase in range(2):
        helpers = draw.sample(range(n, n + k), draw.randrange(k + 1)) if k else []
        nodes = list(range(n)) + helpers
        draw.shuffle(nodes)
        # messages go towards the root in the reduction, away from it in the broadcast
        for i in range(1, len(nodes)):
            child, parent = nodes[i], nodes[draw.randrange(i)]
            source, sink = (child, parent) if phase == 0 else (parent, child)
            sent[source] += 1
            received[sink] += 1
    return sent, received


@settings(max_examples=300, deadline=None)
@given(st.lists(rates, min_size=2, max_size=9), st.lists(rates, max_size=6), st.integers(1, 30), st.integers(0, 2**32))
def test_no_reduction_along_random_trees_beats_the_optimum(workers, helpers, n_elements, seed):
    draw = random.Random(seed)
    machines = cluster(workers, helpers)
    # elements go along trees of their own, in any proportion
    weights = [draw.random() + 0.01 for _ in range(n_elements)]
    load = [0.0] * len(machines)
    sent, received = list(load), list(load)
    for weight in weights:
        tx, rx = tree_loads(draw, len(workers), len(helpers))
        for m in range(len(machines)):
            sent[m] += weight * tx[m]
            received[m] += weight * rx[m]
    time_s = max(max(sent[m], received[m]) / machine.rate for m, machine in enumerate(machines))
    assert time_s >= optimal_shares(machines, sum(weights)).time_s * (1 - 1e-9)


def test_the_tree_that_is_the_optimum_reaches_it():
    # one star around each machine, weighted by the shares: the bound of the test above is not idle
    machines = cluster([10.0] * 5, [10.0] * 2)
    shares = optimal_shares(machines, 1.0)
    load = [0.0] * 7
    for centre, share in enumerate(shares.owned):
        for m in range(5):
            if m != centre:
                load[m] += share
                load[centre] += share
    assert max(load) / 10.0 == pytest.approx(shares.time_s)


@pytest.mark.parametrize(("n", "times"), [
    (2, (1.000, 1.000, 1.000)),
    (4, (1.500, 1.333, 1.200, 1.091, 1.000)),
    (8, (1.750, 1.600, 1.474, 1.366, 1.273, 1.191, 1.120, 1.057, 1.000)),
    (16, (1.875, 1.778, 1.690, 1.611, 1.538, 1.472, 1.412, 1.356, 1.304, 1.257, 1.212, 1.171, 1.132, 1.096, 1.062,
          1.030, 1.000)),
])
def test_equal_rates_give_the_published_table(n, times):
    for k, time_s in enumerate(times):
        shares = check_shares(cluster([1.0] * n, [1.0] * k), 1.0)
        assert shares.time_s == pytest.approx(time_s, abs=5.1e-4)


@pytest.mark.parametrize(("workers", "helpers", "time_s"), [
    ([25] * 8, [10] * 4, 0.0609),
    ([100] * 8, [25] * 8, 0.0147),
    ([100] * 16, [40] * 2 + [25] * 4 + [10] * 8, 0.0164),
    ([25] * 4 + [10] * 4, [25] * 2, 0.1000),
    ([10] * 7 + [5], [10] * 2, 0.2000),
    ([10] * 7 + [2.5], [], 0.4000),
])
def test_unequal_rates_give_the_derived_table(workers, helpers, time_s):
    assert check_shares(cluster(workers, helpers), 1.0).time_s == pytest.approx(time_s, abs=5.1e-5)


def test_equal_rates_give_the_papers_shares():
    n, k, nbytes = 8, 4, 1000.0
    shares = optimal_shares(cluster([1.0] * n, [1.0] * k), nbytes)
    denominator = n * n + k * n - 2 * k
    assert shares.owned[:n] == pytest.approx([(n - k) * nbytes / denominator] * n)
    assert shares.owned[n:] == pytest.approx([2 * (n - 1) * nbytes / denominator] * k)


def test_slowest_worker_owns_nothing_when_it_sets_the_time():
    shares = optimal_shares(cluster([10] * 7 + [2.5]), 1.0)
    assert shares.owned[7] == 0.0
    assert shares.owned[:7] == pytest.approx([1 / 7] * 7)


def test_more_helpers_than_workers_share_evenly():
    shares = optimal_shares(cluster([1.0] * 3, [1.0] * 5), 1.0)
    assert shares.time_s == 1.0
    assert shares.owned == pytest.approx((0, 0, 0, 0.2, 0.2, 0.2, 0.2, 0.2))


def test_two_workers_have_slack_and_spread_by_rate():
    assert optimal_shares(cluster([1.0, 1.0], [1.0]), 3.0).owned == pytest.approx((1, 1, 1))
    assert optimal_shares(cluster([4.0, 2.0], [1.0]), 7.0).owned == pytest.approx((4, 2, 1))


def test_one_worker_keeps_everything():
    shares = optimal_shares(cluster([1.0], [1.0]), 5.0)
    assert shares == (0.0, (5.0, 0.0))


def test_nothing_to_sum_takes_no_time():
    assert optimal_shares(cluster([1.0, 1.0], [1.0]), 0) == (0.0, (0.0, 0.0, 0.0))


def test_a_job_without_ranks_is_refused():
    with pytest.raises(ConfigError, match="machine with ranks"):
        optimal_shares(cluster([], [1.0]), 1.0)
    with pytest.raises(ConfigError, match="machine with ranks"):
        assign([1], cluster([], [1.0]))


def test_one_unknown_rate_makes_all_equal():
    assert optimal_shares(cluster([100.0, 0.0, 50.0]), 3.0).owned == pytest.approx((1, 1, 1))
