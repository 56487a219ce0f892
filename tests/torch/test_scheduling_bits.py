"""The setting scheduling, and cross_barrier: after many steps the weights are the same, bit for bit."""
from __future__ import annotations

import hashlib

import pytest
import torch

import bpsfast.torch as bps

pytestmark = pytest.mark.matrix

N_STEPS = 200
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def train(kind, crosses):
    """Train on this rank's own data; return a hash of all weights, and whether they have changed."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
                              torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 4))
    optimizer = bps.DistributedOptimizer(OPTIMIZERS[kind](net.parameters()), net.named_parameters(),
                                         cross_barrier=crosses)
    before = [p.detach().clone() for p in net.parameters()]
    generator = torch.Generator().manual_seed(bps.rank())
    for _ in range(N_STEPS):
        x = torch.randn(8, 16, generator=generator)
        loss = torch.nn.functional.mse_loss(net(x), x[:, :4] * x[:, 4:8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if crosses:
        optimizer.settle()
    found = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    return found.hexdigest(), not any(torch.equal(old, new) for old, new in zip(before, net.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_200_steps_by_arrival_by_urgency_and_across_the_barrier_end_with_the_same_weights(job, kind):
    small = {"transport": "tcp", "partition_bytes": 4096, "credit_bytes": 8192}
    found = {}
    for scheduling in ("fifo", "priority"):
        ranks = job((1, 1), helpers=1, scheduling=scheduling, **small)
        found[scheduling] = ranks.run(train, kind, False)
    found["crossing"] = ranks.run(train, kind, True)
    for name, of_ranks in found.items():
        assert len({digest for digest, _ in of_ranks}) == 1, f"the ranks' weights differ: {name}"
        assert of_ranks == found["fifo"], name
    assert all(has_changed for _, has_changed in found["fifo"])
