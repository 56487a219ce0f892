"""OuterOptimizer on real ranks, beside all ranks computed one after the other in this process."""
from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import bpsfast
import bpsfast.torch as bps
from bpsfast.torch.fragments import cut

LR, MOMENTUM = 0.7, 0.9


def model(seed, halves=False):
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(7, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Tanh(),
                               torch.nn.Linear(30, 1))
    made[2].weight.requires_grad_(True)
    made[0].bias.requires_grad_(False)
    return made.to(torch.bfloat16) if halves else made


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 7, generator=generator)
    return x.to(dtype), x.sum(1, keepdim=True).sin().to(dtype)


def inner(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)


def train(net, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(rank, step, next(net.parameters()).dtype)
        (net(x) - y).square().mean().backward()
        optimizer.step()


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def on_ranks(n_steps, halves, options):
    """Train on this rank; return its parameters after each step, as float32 arrays."""
    net = model(bpsfast.rank(), halves)
    optimizer = bps.OuterOptimizer(inner(net.parameters()), net, **options)
    found = []
    for step in range(n_steps):
        train(net, optimizer, bpsfast.rank(), [step])
        found.append([w.float().numpy() for w in weights(net)])
    return found


def reference(n_ranks, n_steps, halves, sync_every, n_fragments=1, overlap=0, mix=0.5):
    """Compute what each rank's parameters are after each step: the outer step by torch.optim.SGD itself."""
    root = model(0, halves)
    nets = [copy.deepcopy(root) for _ in range(n_ranks)]
    fixed = {r: model(r, halves)[0].bias for r in range(n_ranks)}
    for r, net in enumerate(nets):  # what is not trained does not travel
        net[0].bias.data.copy_(fixed[r])
    optimizers = [inner(net.parameters()) for net in nets]
    names = [name for name, p in root.named_parameters() if p.requires_grad]
    runs = cut([(name, dict(root.named_parameters())[name]) for name in names], n_fragments)
    outer = {name: dict(root.named_parameters())[name].detach().float().clone().requires_grad_() for name in names}
    steppers = [torch.optim.SGD([outer[name] for name, _ in run], lr=LR, momentum=MOMENTUM, nesterov=True)
                for run in runs]
    due = {}
    found = []
    for step in range(n_steps):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers)):
            train(net, optimizer, rank, [step])
        for number, (run, stepper) in enumerate(zip(runs, steppers)):
            if (step + 1) % sync_every == number * sync_every // len(runs):
                for name, _ in run:
                    moved = [outer[name].detach() - net.get_parameter(name).detach().float() for net in nets]
                    outer[name].grad = sum(moved) / n_ranks
                stepper.step()
                due[number] = step + overlap
            if due.get(number) == step:
                for net in nets:
                    for name, _ in run:
                        p = net.get_parameter(name)
                        kept = mix if overlap else 0.0
                        p.data.copy_(kept * p.detach().float() + (1 - kept) * outer[name].detach())
        found.append([[w.float().numpy() for w in weights(net)] for net in nets])
    return found


OPTIONS = [dict(sync_every=1), dict(sync_every=4), dict(sync_every=4, n_fragments=3),
           dict(sync_every=5, n_fragments=2, overlap=2, mix=0.3)]


@pytest.fixture(params=[((2,), 0, "auto"), ((1, 1), 0, "tcp"), ((2, 1), 1, "tcp"), ((2, 1), 0, "shm")], ids=str)
def ranks(request, shared_job):
    shape, helpers, transport = request.param
    return shared_job(ranks=shape, helpers=helpers, transport=transport)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranks_have_the_weights_of_a_sequential_reference(ranks, options):
    found = ranks.run(on_ranks, 12, False, options)
    wanted = reference(ranks.size, 12, False, **options)
    for step, nets in enumerate(wanted):
        for rank, net in enumerate(nets):
            for ours, theirs in zip(found[rank][step], net):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6, err_msg=f"rank {rank}, step {step}")


def test_halves_travel_as_float32(shared_job):
    job = shared_job(ranks=(2,), transport="auto")
    found, wanted = job.run(on_ranks, 6, True, dict(sync_every=2)), reference(2, 6, True, 2)
    for rank in range(2):
        for ours, theirs in zip(found[rank][-1], wanted[-1][rank]):
            np.testing.assert_allclose(ours, theirs, rtol=0.01, atol=1e-3)
    assert all((a == b).all() for a, b in zip(found[0][-1][0:1], found[1][-1][0:1]))
