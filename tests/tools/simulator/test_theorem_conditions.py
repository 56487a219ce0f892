"""What each condition of the scheduling theorem is worth: violated in one test, the loss beside the bound.

The theorem, its conditions and the bound are those of `test_theorem`. Times are whole and exact:

    condition violated                                optimum  queue  loss  bound
    1 computing is no chain                                11     15     4      1   does not hold: 16 at four times all
    2 the accelerator runs something else                   8     11     3      1   holds with the other op's time: 4
    3 tensors are whole                                    20     35    15     24
    4 partitions are big: 8                                20     27     7      8   3 of 4, 1 of 2, 1 of 1
    5 preemption waits for a window of 8 partitions        20     27     7      8   4 of 4, 2 of 2, 1 of 1
    5 preemption costs 1/2 for each of 16 partitions       20     26     6    9.5
"""
from __future__ import annotations

import pytest

from ...support.best_order import Chain, Op, best, best_of_graph, least
from ...support.chain_by_queue import graph_s, iteration_s, window_s

#: Layer 1's gradients are there one unit of time before layer 0's, which the long forward pass waits for.
CHAIN = Chain((9, 1), (1, 1), (8, 8))


def loss(condition: str, optimum: float, found: float, bound: float) -> float:
    """Return what is lost, and print it beside the bound."""
    print(f"{condition}: optimum {optimum:g}, queue {found:g}, loss {found - optimum:g}, bound {bound:g}")
    return found - optimum


@pytest.mark.parametrize(("scale", "optimum", "queue"), [(1, 11, 15), (4, 44, 60)])
def test_1_a_branch_makes_the_order_of_layers_the_wrong_one_by_any_amount(scale: int, optimum: int, queue: int) -> None:
    """Two ops that need nothing of each other: the first has much to wait for, the second much to compute."""
    sizes = 6 * scale, 2 * scale
    ops = [Op(scale, makes=0), Op(scale, (0,), makes=1), Op(scale, (1,), needs=0), Op(6 * scale, (1,), needs=1)]
    found, bound = graph_s(ops, sizes), window_s(1, 1, 0)
    assert (best_of_graph(ops, sizes, int(found)), found) == (optimum, queue)
    assert bound < loss("1 a branch", optimum, found, bound) == 4 * scale


def test_2_an_op_that_runs_meanwhile_costs_its_own_time_beside_the_bound() -> None:
    """It was ready before a backward pass, and delays all that waits for it, though there is time for it later."""
    other = Op(3)
    ops = [Op(1, makes=1), other, Op(1, (0,), makes=0), Op(1, (2,), needs=0), Op(1, (3,), needs=1)]
    found, bound = graph_s(ops, (4, 1)), window_s(1, 1, 0)
    optimum = best_of_graph(ops, (4, 1), int(found))
    assert (optimum, found) == (8, 11)
    assert bound < loss("2 another op", optimum, found, bound) <= bound + other.seconds


def test_3_whole_tensors_are_not_pulled_before_all_of_them_is_pushed() -> None:
    links, whole = (1, 1), CHAIN.sizes[0]
    optimum = least(CHAIN, links)
    found, bound = iteration_s(CHAIN, whole, links), 2 * window_s(whole, 1, 0) + whole
    assert (optimum, found, bound) == (20, 35, 24)
    assert 0 < loss("3 whole tensors", optimum, found, bound) <= bound
    assert 0 < loss("3 partitions of 1", optimum, iteration_s(CHAIN, 1, links), 3) <= 3


def test_4_what_is_urgent_waits_for_the_rest_of_a_partition() -> None:
    optimum = least(CHAIN, (1,))
    lost = []
    for part in (8, 4, 2, 1):
        found, bound = iteration_s(CHAIN, part, (1,)), window_s(part, 1, 0)
        lost.append(loss(f"4 partitions of {part}", optimum, found, bound))
        assert lost[-1] <= bound
        # Who knows what will be ready when leaves the link idle until then, and loses nothing; a queue does not know.
        assert best(CHAIN, part, (1,), int(found)) == optimum
    assert lost == [7, 3, 1, 1]


def test_5_what_is_urgent_waits_for_a_window() -> None:
    optimum, lost = least(CHAIN, (1,)), []
    for credit in (8, 4, 2, 1):
        found, bound = iteration_s(CHAIN, 1, (1,), credit), window_s(1, 1, credit)
        lost.append(loss(f"5 a window of {credit} partitions", optimum, found, bound))
        assert lost[-1] <= bound
    assert lost == [7, 4, 2, 1]


def test_5_every_partition_costs_its_overhead() -> None:
    optimum, overhead, n_parts = least(CHAIN, (1,)), 0.5, sum(CHAIN.sizes)
    found, bound = iteration_s(CHAIN, 1, (1,), 0, overhead), window_s(1, 1, 0, overhead) + n_parts * overhead
    assert 0 < loss("5 an overhead", optimum, found, bound) <= bound
    assert (found, bound) == (26, 9.5)
