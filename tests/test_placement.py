"""Placement: the closed form against a linear program, the published tables, and the greedy assignment."""
from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.errors import CapacityError, ConfigError
from bpsfast.orchestration.placement import (
    Machine,
    WireBytes,
    assign,
    check_policy,
    optimal_shares,
    predict_wire,
    ring_wire,
    step_time_s,
)

PART = 4096000


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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(2, 5), st.integers(1, 4), st.data())
def test_greedy_keeps_to_the_bounds(parts, n, k, data):
    bounds = [data.draw(st.one_of(st.none(), st.integers(0, 400))) for _ in range(k)]
    machines = [Machine(True, 1.0)] * n + [Machine(False, 1.0, most_nbytes=bound) for bound in bounds]
    owned = [0] * (n + k)
    for nbytes, owner in zip(parts, assign(parts, machines)):
        owned[owner] += nbytes
    assert all(have <= machine.limit_nbytes for have, machine in zip(owned, machines))


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


# -- greedy -----------------------------------------------------------------------------------------------

def vgg16():
    """The partitions of VGG-16 in float32, at most 4,096,000 bytes each, and their BytePS keys."""
    sizes = [1728, 64, 36864, 64, 73728, 128, 147456, 128, 294912, 256, 589824, 256, 589824, 256, 1179648, 512, 2359296,
             512, 2359296, 512, 2359296, 512, 2359296, 512, 2359296, 512, 102760448, 4096, 16777216, 4096, 4096000,
             1000]
    parts, keys = [], []
    for tensor, n_elements in enumerate(sizes):
        nbytes = 4 * n_elements
        pieces = [PART] * (nbytes // PART) + ([nbytes % PART] if nbytes % PART else [])
        keys += [tensor << 16 | index for index in range(len(pieces))]
        parts += pieces
    return parts, keys


@pytest.mark.parametrize(("n", "k", "gap"), [(8, 4, 0.008), (8, 8, 0.009), (16, 8, 0.008), (32, 16, 0.1)])
def test_greedy_is_near_the_bound_and_the_stock_hash_is_not(n, k, gap):
    parts, keys = vgg16()
    machines = cluster([1.0] * n, [1.0] * k)
    best = optimal_shares(machines, sum(parts)).time_s
    greedy = step_time_s(zip(parts, assign(parts, machines)), machines)
    hashed = step_time_s(zip(parts, assign(parts, machines, "hash:mixed", keys=keys)), machines)
    assert best <= greedy <= best * (1 + gap)
    assert hashed > best * 1.15


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, PART), min_size=1, max_size=60), st.lists(st.tuples(rates, sum_rates), min_size=2,
       max_size=6), st.lists(st.tuples(rates, sum_rates), max_size=6))
def test_greedy_exceeds_the_bound_by_one_partition_at_most(parts, workers, helpers):
    machines = [Machine(True, *each) for each in workers] + [Machine(False, *each) for each in helpers]
    n = len(workers)
    owners = assign(parts, machines)
    assert owners == assign(parts, machines)
    time_s = step_time_s(zip(parts, owners), machines)
    best = optimal_shares(machines, sum(parts)).time_s
    # Some machine is within its share when the last partition comes: the worst is above by what that costs at most.
    dearest = max(max((n if not machine.has_ranks else n - 2) * max(parts) / machine.rate,
                      n * max(parts) / machine.sum_rate if machine.sum_rate else 0.0) for machine in machines)
    assert best * (1 - 1e-9) <= time_s <= best + dearest + 1e-6


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(0, 4), st.integers(1, 30))
def test_greedy_is_optimal_for_equal_partitions(n, k, n_parts):
    machines = cluster([1.0] * n, [1.0] * k)
    time_s = step_time_s(zip([64] * n_parts, assign([64] * n_parts, machines)), machines)
    # By counting: the least time in which the machines can take n_parts between them.
    counts = range(n_parts + 1)
    for candidate in sorted({64 * (n_parts + (n - 2) * c) for c in counts} | {64 * n * c for c in counts}):
        per_worker = n_parts if n == 2 else (candidate // 64 - n_parts) // (n - 2)
        if candidate >= 64 * n_parts and n * max(0, per_worker) + k * (candidate // 64 // n) >= n_parts:
            assert time_s == candidate
            break


def test_greedy_places_on_top_of_what_is_owned():
    machines = cluster([1.0] * 4)
    first = assign([PART] * 3, machines)
    assert first == [0, 1, 2]
    owned = [PART, PART, PART, 0]
    assert assign([PART], machines, owned=owned) == [3]
    assert assign([PART] * 5, machines, owned=[0, 3 * PART, 0, 0]) == [0, 2, 3, 0, 2]


def test_greedy_uses_all_three_machines_of_the_smallest_mixed_job():
    machines = cluster([0.0, 0.0], [0.0])
    owners = assign([PART] * 9, machines)
    assert [owners.count(m) for m in range(3)] == [3, 3, 3]
    assert step_time_s(zip([PART] * 9, owners), machines) == 9 * PART


def test_colocated_uses_machines_with_ranks_only():
    assert set(assign([1000] * 40, cluster([1.0] * 3, [1.0] * 2), "colocated")) == {0, 1, 2}


def test_ps_uses_helpers_only():
    machines = cluster([1.0], [1.0] * 2)
    owners = assign([1000] * 10, machines, "ps")
    assert sorted(owners) == [1] * 5 + [2] * 5


def test_ps_without_helpers_is_refused():
    with pytest.raises(ConfigError, match="has none"):
        assign([1], cluster([1.0, 1.0]), "ps")


@pytest.mark.parametrize("policy", ["optimal", "colocated", "hash:djb2", "hash:mixed"])
def test_one_machine_with_ranks_owns_everything(policy):
    machines = cluster([1.0], [1.0])
    owners = assign([1000, 2000], machines, policy)
    assert owners == [0, 0]
    assert predict_wire(zip([1000, 2000], owners), machines) == [WireBytes(0, 0), WireBytes(0, 0)]


@pytest.mark.parametrize("name", ["naive", "built_in", "djb2", "sdbm", "mixed"])
def test_hash_policies_depend_on_the_key_only(name):
    machines = cluster([1.0] * 4, [1.0] * 2)
    keys = [(5 << 16) + i for i in range(50)]
    owners = assign([1000] * 50, machines, f"hash:{name}", keys=keys)
    backwards = assign([7] * 50, machines, f"hash:{name}", owned=[9] * 6, keys=keys[::-1])
    assert owners == backwards[::-1]
    assert set(owners) <= set(range(6))


@pytest.mark.parametrize("policy", ["", "best", "hash:", "hash:md5", "Optimal"])
def test_unknown_policies_are_named(policy):
    with pytest.raises(ConfigError, match=f"placement '{policy}' is unknown.*hash:NAME.*sdbm"):
        check_policy(policy)


# -- predicted bytes --------------------------------------------------------------------------------------

def test_predicted_bytes_of_a_small_job():
    machines = cluster([1.0] * 3, [1.0])
    # 100 bytes owned by node 0: it hears two others and tells two. 10 by the helper: it hears and tells three.
    assert predict_wire([(100, 0), (10, 3)], machines) == [(210, 210), (110, 110), (110, 110), (30, 30)]


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(0, 6), st.integers(0, 2**32))
def test_every_byte_sent_is_received(n, k, seed):
    draw = random.Random(seed)
    machines = cluster([1.0] * n, [1.0] * k)
    parts = [(draw.randrange(1, 10**6), draw.randrange(n + k)) for _ in range(20)]
    wire = predict_wire(parts, machines)
    # A message has two ends: pushes and pulls, n - 1 or n of them each.
    messages = sum(2 * nbytes * (n - 1 if owner < n else n) for nbytes, owner in parts)
    assert sum(w.tx for w in wire) == sum(w.rx for w in wire) == messages


def test_ring_carries_what_the_optimum_without_helpers_carries():
    machines = cluster([1.0] * 4)
    assert ring_wire(1000, machines) == [(1500, 1500)] * 4
    assert predict_wire([(250, m) for m in range(4)], machines) == [(1500, 1500)] * 4
    assert ring_wire(1000, cluster([1.0] * 2, [1.0])) == [(1000, 1000)] * 2 + [(0, 0)]


@given(n=st.integers(2, 9), k=st.integers(0, 9), n_parts=st.integers(1, 300))
def test_every_stretch_of_equal_partitions_is_shared_as_the_whole(n, k, n_parts):
    machines = [Machine(True)] * n + [Machine(False)] * k
    owners = assign([4096] * n_parts, machines)
    totals = [owners.count(m) for m in range(n + k)]
    for end in range(n_parts + 1):
        for m, total in enumerate(totals):
            assert abs(owners[:end].count(m) - total * end / n_parts) <= 2
