"""A small network, and its expected gradients: the averages over all ranks, by definition."""
from __future__ import annotations

import copy

import torch

import bpsfast.torch as bps


def network(seed=0, dtype=torch.float64, bias=True):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4, bias=bias), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(dtype)


def batch(rank, step=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model, rank, step=0, dtype=torch.float64):
    return model(batch(rank, step, dtype)).square().sum()


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def assert_close(found, wanted, tolerance=1e-12):
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance), (a, b)


def averages(model, loss=loss_of, steps=(0,), dtype=torch.float64):
    """Return the gradients by definition, those of the mean loss over all ranks."""
    model = copy.deepcopy(model)
    model.zero_grad()
    by_rank = []
    for rank in range(bps.size()):
        model.zero_grad()
        for step in steps:
            loss(model, rank, step, dtype).backward()
        by_rank.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
    return [sum(each.double() for each in found) / bps.size() for found in zip(*by_rank)]
