"""From what nodes say to what a placement counts on: unknown NICs, limits, slow sums, and the words for them."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.messages import NodeInfo
from bpsfast.orchestration.placement.rates import machines_of, remarks
from bpsfast.orchestration.placement.shares import Machine, optimal_shares

GBIT = 1e9 / 8


def job(*rates, limits=(), sums=(), n_workers=None):
    """Nodes with NICs of *rates* Gbit/s (0: not known); the last has no ranks. *limits*, *sums*: by index, Gbit/s."""
    n_workers = len(rates) - 1 if n_workers is None else n_workers
    limits, sums = dict(limits), dict(sums)
    return [NodeInfo(index=i, host="abcdefghij"[i], pid=1, address="", shm_name="", ranks=(i,) if i < n_workers else (),
                     nic_rate_bytes=rate * GBIT, nic_limit_bytes=limits.get(i, 0.0) * GBIT,
                     sum_rate_bytes=sums.get(i, 0.0) * GBIT) for i, rate in enumerate(rates)]


def gbits(nodes):
    return [machine.rate / GBIT for machine in machines_of(nodes)]


def test_what_is_known_counts():
    nodes = job(10, 25, 5, sums=[(2, 3)])
    assert machines_of(nodes) == [Machine(True, 10 * GBIT), Machine(True, 25 * GBIT),
                                  Machine(False, 5 * GBIT, 3 * GBIT)]
    assert remarks(job(10, 25, 5), "optimal") == []


def test_of_all_unknown_nics_nothing_is_said_and_all_are_alike():
    assert gbits(job(0, 0, 0)) == [0, 0, 0] and remarks(job(0, 0, 0), "optimal") == []


def test_an_unknown_nic_is_taken_as_the_slowest_known_one():
    nodes = job(25, 0, 10, 0)
    assert gbits(nodes) == [25, 10, 10, 10]
    assert remarks(nodes, "optimal") == [
        "no NIC rate is known of node 1 (host b, rank 1), helper 0 (node 3, host d): taken as 10 Gbit/s, the least "
        "known; BPSFAST_NIC_RATE says it"]


def test_a_limit_is_what_its_node_may_take_and_says_nothing_of_others():
    assert gbits(job(25, 25, 25, limits=[(2, 5)])) == [25, 25, 5]
    assert gbits(job(10, 0, 25, limits=[(2, 5)])) == [10, 10, 5], "of the others a NIC is known"
    assert gbits(job(4, 4, 4, limits=[(2, 5)])) == [4, 4, 4]
    nodes = job(0, 0, 0, limits=[(1, 2), (2, 5)])
    assert gbits(nodes) == [5, 2, 5]
    (remark,) = remarks(nodes, "optimal")
    assert remark.startswith("no NIC rate is known of every node: taken as 5 Gbit/s, the largest limit of a node")


def test_slow_sums_without_a_rate_to_weigh_them_against_are_named():
    assert remarks(job(0, 0, 0, sums=[(2, 3)]), "optimal") == [
        "helper 0 (node 2, host c) can sum only so much, but no NIC's rate is known to weigh that against: set "
        "BPSFAST_NIC_RATE"]


def test_a_helper_too_slow_for_its_share_is_given_less_and_named():
    nodes = job(10, 10, 10, 10, 10, sums=[(4, 3)])
    owned = optimal_shares(machines_of(nodes), 1.0).owned
    whole = 2 * (4 - 1) / (4 * 4 + 4 - 2)  # the share of a helper like the others
    (remark,) = remarks(nodes, "optimal")
    assert remark.startswith(f"helper 0 (node 4, host e) sums 3 Gbit/s of input, too slow for its share: it is given "
                             f"{owned[4]:.1%} of the bytes, and not the {whole:.1%} that its NIC (10 Gbit/s) could "
                             "take; more")
    assert owned[4] == pytest.approx(3 * GBIT * optimal_shares(machines_of(nodes), 1.0).time_s / 4)


def test_a_placement_that_does_not_weigh_sums_is_named():
    (remark,) = remarks(job(10, 10, 10, 10, 10, sums=[(4, 3)]), "hash:djb2")
    assert "less than its NIC brings (10 Gbit/s): with placement hash:djb2 the others may wait for it" in remark


def test_sums_that_keep_up_need_no_word():
    assert remarks(job(10, 10, 10, 10, 10, sums=[(4, 30), (0, 100)]), "optimal") == []
