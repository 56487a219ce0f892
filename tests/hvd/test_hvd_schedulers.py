"""Learning-rate schedulers made before or after their optimizer is wrapped; pickles of both."""
from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

import bpsfast.hvd as hvd
import bpsfast.torch as bps
from tests.support.hvd_ranks import begun

pytestmark = pytest.mark.timeout(200)


def halved(epoch):
    return 0.5 ** epoch


#: How each scheduler is made of an optimizer.
SCHEDULERS = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, halved),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.1),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.5, step_size_up=3),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]),
}
WRAPPERS = {"hvd": hvd.DistributedOptimizer, "bps": bps.DistributedOptimizer}


def made():
    p = torch.nn.Parameter(torch.ones(2))
    return p, torch.optim.SGD([p], lr=0.1, momentum=0.9)


def steps(p, optimizer, scheduler, scale, n):
    """Make *n* steps with the gradient *scale*; return the rates."""
    rates = []
    for _ in range(n):
        optimizer.zero_grad()
        (p * scale).sum().backward()
        optimizer.step()
        scheduler.step(*[1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def of_one_process(name):
    """Return the expected rates and parameters: the mean of both ranks' gradients is 1.5."""
    p, optimizer = made()
    rates = steps(p, optimizer, SCHEDULERS[name](optimizer), 1.5, 6)
    return rates, p.tolist()


def scheduled(api, name, before):
    """Train with a scheduler made *before* wrapping or after; after three steps the optimizer loads its own state."""
    title = f"{api} {name} {before}"
    p, optimizer = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step")  # SequentialLR's own
        scheduler = SCHEDULERS[name](optimizer) if before else None
        wrapped = WRAPPERS[api](optimizer, [(title, p)])
        scheduler = scheduler or SCHEDULERS[name](wrapped)
        rates = steps(p, wrapped, scheduler, hvd.rank() + 1.0, 3)
        wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
        rates += steps(p, wrapped, scheduler, hvd.rank() + 1.0, 3)
    return rates, p.tolist()


@pytest.fixture
def pair(shared_job):
    return begun(shared_job(ranks=(2,)))


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("api", WRAPPERS)
def test_schedulers_set_the_rates_of_one_process(pair, api, name, before):
    rates, values = of_one_process(name)
    for found in pair.run(scheduled, api, name, before):
        assert found == (pytest.approx(rates), pytest.approx(values, rel=1e-5))


def warned_too_early(api):
    """A scheduler that is stepped before the optimizer still causes torch's warning."""
    p, optimizer = made()
    scheduler = SCHEDULERS["StepLR"](optimizer)
    WRAPPERS[api](optimizer, [(f"too early {api}", p)])
    with pytest.warns(UserWarning, match=r"before `optimizer\.step"):
        scheduler.step()
    return True


@pytest.mark.parametrize("api", WRAPPERS)
def test_a_true_warning_is_given(pair, api):
    assert pair.run(warned_too_early, api) == [True] * 2


def pickled(api, name, before):
    """Pickle a scheduler with its optimizer, wrap the loaded optimizer again, and continue."""
    title = f"pickled {api} {name} {before}"
    p, optimizer = made()
    scheduler = SCHEDULERS[name](optimizer) if before else None
    wrapped = WRAPPERS[api](optimizer, [(title, p)])
    scheduler = scheduler or SCHEDULERS[name](wrapped)
    rates = steps(p, wrapped, scheduler, hvd.rank() + 1.0, 3)
    file = io.BytesIO()
    torch.save((p, wrapped, scheduler), file)
    q, plain, again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert type(plain) is torch.optim.SGD and plain.state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0
    assert again.state_dict().keys() == scheduler.state_dict().keys()
    for lost in (plain, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        with pytest.raises(ValueError, match=r"pickled or copied DistributedOptimizer.*wrap it"):
            lost.step()
    if not before:
        assert again.optimizer is plain
    other = WRAPPERS[api](plain, [(f"{title} again", q)])
    rates += steps(q, other, again, hvd.rank() + 1.0, 3)
    return rates, q.tolist()


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("name", ["OneCycleLR", "StepLR", "ReduceLROnPlateau", "LambdaLR"])
@pytest.mark.parametrize("api", WRAPPERS)
def test_what_was_pickled_is_wrapped_again(pair, api, name, before):
    rates, values = of_one_process(name)
    for found in pair.run(pickled, api, name, before):
        assert found == (pytest.approx(rates), pytest.approx(values, rel=1e-5))
