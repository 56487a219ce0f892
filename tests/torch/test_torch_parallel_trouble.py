"""DistributedDataParallel with errors: all ranks name them, and recover where possible."""
from __future__ import annotations

import pytest
import torch

import bpsfast.torch as bps
from bpsfast.orchestration.errors import BusyError, ConfigError, MismatchError
from bpsfast.torch.parallel import DistributedDataParallel
from tests.support.averaged_gradients import assert_close, averages, gradients, loss_of, network

pytestmark = pytest.mark.matrix


def fails_between():
    """A backward pass that an exception interrupts: synchronize completes the step, and training continues."""
    model = network(seed=8)
    ddp = DistributedDataParallel(model)
    loss_of(ddp, bps.rank()).backward()
    ddp.zero_grad()
    handle = model[0].register_full_backward_pre_hook(raise_it)
    with pytest.raises(ZeroDivisionError):
        loss_of(ddp, bps.rank()).backward()
    handle.remove()
    if bps.size() > 1:
        with pytest.raises(BusyError, match="synchronize"):
            loss_of(ddp, bps.rank()).backward()
    ddp.synchronize()
    ddp.zero_grad()
    loss_of(ddp, bps.rank()).backward()
    assert_close(gradients(model), averages(model))


def raise_it(*_):
    raise ZeroDivisionError


def test_a_backward_pass_that_fails(everywhere):
    everywhere.run(fails_between)


def differs():
    DistributedDataParallel(torch.nn.Linear(3, 4 + bps.rank() // 2))


def test_modules_that_differ(job):
    outcomes = job(ranks=(2, 1)).attempt(differs)
    assert outcomes[2].error == MismatchError.__name__ and "(5,)" in outcomes[2].text and "(4,)" in outcomes[2].text


def stalls():
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    for _ in range(2 if bps.rank() == 0 else 1):
        ddp(torch.ones(2, 3)).sum().backward()


def test_a_rank_that_makes_fewer_steps_is_named(job):
    broken = job(ranks=(2,), timeout_s=2)
    waits, leaves = broken.attempt(stalls)
    broken.kill()
    assert waits.error == "StallError" and "rank 1" in waits.text and not leaves.error, waits


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ({"device_ids": [0, 1]}, ConfigError, "a rank for each"), ({"compression": 3}, ConfigError, "compress and"),
])
def test_arguments_that_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        DistributedDataParallel(torch.nn.Linear(2, 2), **arguments)
