"""torch's gradients through islands: with two ranks the bits are the same as without islands."""
from __future__ import annotations

import pytest
import torch

import bpsfast.torch as bps


def train(kind, compression):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2048),
                                torch.nn.ReLU(), torch.nn.Linear(2048, 4))
    compressor = getattr(bps.Compression, compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "ddp":
        model = bps.DistributedDataParallel(model, compression=compressor)
    else:
        bps.broadcast_parameters(model.state_dict(), 0)
        named = [(f"{kind} {compression} {name}", p) for name, p in model.named_parameters()]
        optimizer = bps.DistributedOptimizer(optimizer, named, compressor, cross_barrier=kind == "cross_barrier")
    torch.manual_seed(bps.rank() + 1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    if kind == "cross_barrier":
        optimizer.settle()
    return [p.detach().numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize(("kind", "compression"), [("optimizer", "none"), ("optimizer", "fp16"), ("ddp", "none"),
                                                   ("cross_barrier", "none")])
def test_the_same_bits_as_without(shared_job, kind, compression):
    plain = shared_job(ranks=(2,)).run(train, kind, compression)
    on_device = shared_job(ranks=(2,), host_device=True).run(train, kind, compression)
    islands = shared_job(ranks=(2,), host_device=True, islands="auto").run(train, kind, compression)
    assert plain[0] == plain[1] == on_device[0] == on_device[1] == islands[0] == islands[1]
