"""Averaged gradients that a program discards: the mark that gradients are averages holds only while they are."""
from __future__ import annotations

import pytest
import torch

import bpsfast.hvd as hvd
import bpsfast.torch as bps
from tests.support.hvd_ranks import begun

#: hvd's optimizers reduce gradients in two ways; Max takes the other one.
WAYS = {"bps": (bps, {}), "cross": (bps, {"cross_barrier": True}), "hvd": (hvd, {}), "hvd max": (hvd, {"op": hvd.Max})}


@pytest.fixture(scope="module")
def pair(shared_job):
    return begun(shared_job(ranks=(2,)))


def net(seed=2):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def data(step, rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(17 * step + rank))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def wrapped(way, model, prefix):
    made, options = WAYS[way]
    return made.DistributedOptimizer(sgd(model.parameters()), list(model.named_parameters(prefix=prefix)), **options)


def settled(*optimizers):
    for each in optimizers:
        getattr(each, "settle", lambda: None)()


def backward(way, model, losses):
    """Give *model*, in one process, the reduced gradients of *losses*, one for each rank."""
    every = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for p, gradients in zip(model.parameters(), zip(*every)):
        stacked = torch.stack(gradients)
        p.grad = stacked.amax(0) if way == "hvd max" else stacked.mean(0)


def assert_same(model, other):
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6), name


def discarded(way, by_module):
    """zero_grad raises while gradients are under way; it clears averages, and the next gradients are averaged."""
    model, ref = net(), net()
    optimizer, own = wrapped(way, model, f"discarded {way} {by_module}"), sgd(ref.parameters())
    for step in range(3):
        model(data(step, bps.rank())).sum().backward()
        with pytest.raises(AssertionError, match="race condition"):
            optimizer.zero_grad()
        optimizer.synchronize()
        (model if by_module else optimizer).zero_grad()
        if not by_module or bps.rank() == 0:
            model(data(step, bps.rank())).square().sum().backward()
        optimizer.step()
        settled(optimizer)
        optimizer.zero_grad()
        ranks = range(1 if by_module else bps.size())
        losses = [ref(data(step, rank)).square().sum() for rank in ranks]
        backward(way, ref, losses + [0 * ref(data(0, 1)).sum()] * (bps.size() - len(ranks)))
        own.step()
    assert_same(model, ref)


@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_discarded_counts_no_more(pair, way, by_module):
    pair.run(discarded, way, by_module)


def stepped_twice(way):
    """The optimizer's own step raises; the next gradients are averaged again."""
    model, ref = net(), net()
    optimizer, own = wrapped(way, model, f"twice {way}"), sgd(ref.parameters())
    optimizer.zero_grad()
    model(data(0, bps.rank())).sum().backward()
    optimizer.param_groups[0]["lr"] = "none"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad()
    optimizer.state.clear()
    model(data(1, bps.rank())).sum().backward()
    optimizer.step()
    settled(optimizer)
    backward(way, ref, [ref(data(1, rank)).sum() for rank in range(bps.size())])
    own.step()
    assert_same(model, ref)


@pytest.mark.parametrize("way", ["bps", "hvd", "hvd max"])
def test_a_step_that_fails(pair, way):
    pair.run(stepped_twice, way)


def adversaries(way):
    """The generator's loss fills gradients of the discriminator, which it does not use."""
    models, refs = (net(3)[0], net(3)[2]), (net(3)[0], net(3)[2])
    g, d = (wrapped(way, model, f"adversary {way} {i}") for i, model in enumerate(models))
    own_g, own_d = (sgd(model.parameters()) for model in refs)
    for step in range(3):
        d.zero_grad()
        models[1](models[0](data(step, bps.rank())).detach()).square().sum().backward()
        d.step()
        g.zero_grad()
        models[1](models[0](data(step, bps.rank()))).sum().backward()
        g.step()
        d.synchronize()
        backward(way, refs[1], [refs[1](refs[0](data(step, rank)).detach()).square().sum() for rank in range(2)])
        own_d.step()
        backward(way, refs[0], [refs[1](refs[0](data(step, rank))).sum() for rank in range(2)])
        own_g.step()
    settled(d, g)
    for model, ref in zip(models, refs):
        assert_same(model, ref)


@pytest.mark.parametrize("way", WAYS)
def test_synchronize_of_another_optimizer_releases_its_gradients(pair, way):
    pair.run(adversaries, way)
