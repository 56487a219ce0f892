"""Placement of whole partitions: near the optimum, deterministic, and what it puts on the wire."""
from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.placement.assignment import (
    WireBytes,
    assign,
    predict_wire,
    ring_wire,
    step_time_s,
)
from bpsfast.orchestration.placement.shares import Machine, optimal_shares
from bpsfast.orchestration.placement_policy import check_policy

PART = 4096000

rates = st.floats(0.5, 100.0)
sum_rates = st.one_of(st.just(0.0), st.floats(0.05, 300.0))


def cluster(workers, helpers=()):
    """Machines with these rates."""
    return [Machine(True, rate) for rate in workers] + [Machine(False, rate) for rate in helpers]


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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(2, 5), st.integers(1, 4), st.data())
def test_greedy_keeps_to_the_bounds(parts, n, k, data):
    bounds = [data.draw(st.one_of(st.none(), st.integers(0, 400))) for _ in range(k)]
    machines = [Machine(True, 1.0)] * n + [Machine(False, 1.0, most_nbytes=bound) for bound in bounds]
    owned = [0] * (n + k)
    for nbytes, owner in zip(parts, assign(parts, machines)):
        owned[owner] += nbytes
    assert all(have <= machine.limit_nbytes for have, machine in zip(owned, machines))


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
