"""LearningRates returns the present learning rate of each parameter's group."""
from __future__ import annotations

import gc

import pytest
import torch

from bpsfast.torch.optimizer_extras import LearningRates


def parameter():
    return torch.nn.Parameter(torch.zeros(2))


def test_each_group_has_its_own_as_it_is_now():
    a, b = parameter(), parameter()
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1)
    rates = LearningRates(optimizer)
    assert (rates.of(a), rates.of(b), rates.of(parameter())) == (0.1, 0.5, None)
    optimizer.load_state_dict(optimizer.state_dict())  # which makes the groups anew
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    assert (rates.of(a), rates.of(b)) == (0.25, 0.5)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan"), None])
def test_what_is_no_rate_of_a_step_is_not_told(rate):
    a = parameter()
    optimizer = torch.optim.SGD([a], lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    assert LearningRates(optimizer).of(a) is None


def test_the_optimizer_is_not_kept_alive():
    a = parameter()
    optimizer = torch.optim.SGD([a], lr=0.1)
    rates = LearningRates(optimizer)
    del optimizer
    gc.collect()
    assert rates.of(a) is None
