"""A plan's arithmetic: the step, the bottleneck, which helpers pay."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.placement.shares import least_time_s, optimal_shares
from bpsfast.tools.planner import catalog, machine_list, prediction
from bpsfast.tools.planner.catalog import Compute, Model

NET = Model("net", "net", {"a": (10, 10), "a.bias": (10,), "b": (10, 10), "c": (10, 80)})


def compute(forward_s, backward_s):
    return Compute(forward_s, backward_s, 0, "", "")


def test_a_step_without_communication_is_compute():
    assert prediction.step_s(NET, compute(1.0, 3.0), 0.0) == pytest.approx(4.0)
    assert prediction.step_s(NET, None, 1.0) is None


def test_a_step_without_compute_is_communication():
    assert prediction.step_s(NET, compute(0.0, 0.0), 2.0) == pytest.approx(2.0)


def test_gradients_that_appear_last_are_exposed():
    # layers are a (110 elements), b (100), c (800): c's 800/1010 go behind a's and b's backward; a's come at the end
    total = 1010
    assert prediction.step_s(NET, compute(1.0, 3.0), 0.5) == pytest.approx(4.0 + 0.5 * 110 / total)
    # slow links: from c's gradient on, a second into backward, the link is never idle
    assert prediction.step_s(NET, compute(1.0, 3.0), 50.0) == pytest.approx(2.0 + 50.0)


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 3))
def test_a_step_is_between_perfect_overlap_and_none(forward_s, backward_s, comm_s):
    found = prediction.step_s(NET, compute(forward_s, backward_s), comm_s)
    assert max(forward_s + backward_s, forward_s + comm_s) - 1e-9 <= found <= forward_s + backward_s + comm_s + 1e-9


def machines(workers, helpers="0", nic=100.0):
    return [*machine_list.parse(workers, True, nic), *machine_list.parse(helpers, False, nic)]


def test_helpers_that_communication_no_longer_waits_for_do_not_shorten_the_step():
    made = prediction.make(catalog.load("resnet50"), machines("8", "2"), compute=compute(0.5, 10.0))
    assert made.helpers.last == 8 and made.helpers.last_for_step == 0
    made = prediction.make(catalog.load("vgg16"), machines("8", "2", 1.0), compute=compute(0.01, 0.02))
    assert made.helpers.last_for_step == 8


def test_one_worker_has_nothing_to_communicate():
    made = prediction.make(catalog.load("resnet50"), machines("1"))
    assert made.bottleneck is None and [each.formula_s for each in made.predictions] == [0.0, 0.0, 0.0]


def test_the_layouts_are_in_order_and_the_optimum_is_the_best():
    made = prediction.make(catalog.load("bert-large"), machines("4x25,4x10", "2x25"))
    assert [each.layout for each in made.predictions] == list(prediction.LAYOUTS)
    optimal = made.predictions[-1]
    # papers: 4 at 25 and 4 at 10 with 2 helpers at 25: 1.75 times as fast as a ring
    assert made.predictions[0].formula_s / optimal.formula_s == pytest.approx(1.75)
    assert optimal.placed_s == min(each.placed_s for each in made.predictions[1:])


@pytest.mark.parametrize("helpers", ["", "1x25", "2x25", "1x12.5,1x50"])
def test_the_helper_whose_loss_costs_most_is_named_with_what_moves(helpers):
    model, workers = catalog.load("bert-large"), "4x25"
    there = machines(workers, helpers) if helpers else machines(workers)
    made = prediction.make(model, there)
    if not helpers:
        assert made.loss is None
        return
    lost = max(range(4, len(there)), key=lambda m: (there[m].rate, -m))
    rest = [*there[:lost], *there[lost + 1 :]]
    optimum_s = least_time_s(rest, model.nbytes)
    assert made.loss.machine == f"helper {lost - 4}"
    assert made.predictions[-1].placed_s < made.loss.placed_s < optimum_s * 1.05
    own = optimal_shares(there, model.nbytes).owned[lost]
    assert own * 0.95 < made.loss.moved_nbytes < own * 1.5, "its own, and what the new optimum forces"
