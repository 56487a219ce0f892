"""AsyncOptimizer, and DistributedOptimizer with the setting async_training, on real ranks."""
from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch

import bpsfast
import bpsfast.torch as bps


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def train(net, optimizer, rank, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(16, 7, generator=generator)
        optimizer.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(net):
    return [p.detach().numpy().copy() for p in net.parameters()]


def reference(n_ranks, n_steps):
    """Let all ranks step from the same weights, and sum their changes."""
    nets = [copy.deepcopy(model(0)) for _ in range(n_ranks)]
    optimizers = [optimizer_of(net) for net in nets]
    for step in range(n_steps):
        before = [p.detach().clone() for p in nets[0].parameters()]
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers)):
            train(net, optimizer, rank, [step])
        for i, old in enumerate(before):
            new = old + sum(list(net.parameters())[i].detach() - old for net in nets)
            for net in nets:
                list(net.parameters())[i].data.copy_(new)
    return weights(nets[0])


def together(explicit):
    rank = bpsfast.rank()
    net = model(rank)
    named = net.named_parameters()
    if explicit:
        optimizer = bps.AsyncOptimizer(optimizer_of(net), named, worker="rank", staleness=0)
    else:
        optimizer = bps.DistributedOptimizer(optimizer_of(net), named_parameters=named)
        bps.broadcast_parameters(net.state_dict(), root_rank=0)
    for step in range(8):
        train(net, optimizer, rank, [step])
        optimizer.synchronize()
        bpsfast.barrier()  # else a fast rank's next change may be in a slow one's answer already
    found = weights(net)
    optimizer.close()
    return found


@pytest.fixture
def ranks(shared_job):
    return shared_job(ranks=(2, 1), helpers=1, transport="tcp", async_training=True, async_staleness=0)


@pytest.mark.parametrize("explicit", [True, False], ids=["AsyncOptimizer", "DistributedOptimizer"])
def test_without_staleness_all_changes_of_a_step_are_added_up(ranks, explicit):
    wanted = reference(3, 8)
    for found in ranks.run(together, explicit, timeout_s=120):
        for ours, theirs in zip(found, wanted):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def apart():
    """Make a different number of steps on each rank, each of which adds the rank + 1; return the final weights."""
    rank = bpsfast.rank()
    p = torch.nn.Parameter(torch.zeros(5))
    optimizer = bps.AsyncOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)])
    for _ in range(10 * (rank + 1)):
        p.grad = torch.full_like(p, -(rank + 1.0))
        optimizer.step()
    bpsfast.barrier()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.close()
    return p.tolist()


def test_workers_may_make_different_numbers_of_steps(shared_job):
    assert shared_job(ranks=(1, 1), transport="tcp").run(apart, timeout_s=120) == [[50.0] * 5] * 2


def in_lockstep(net, optimizer, rank, steps):
    """Train; no rank's answer has the next change of a faster one, as it may even with a staleness of 0."""
    for step in steps:
        train(net, optimizer, rank, [step])
        bpsfast.barrier()


def resumed():
    """Rank 1 changes nothing: in which order the changes of a step arrive would decide the last bit."""
    rank = bpsfast.rank()
    net = model(rank)
    rate = 0.0 if rank == 1 else 0.05
    optimizer = bps.AsyncOptimizer(torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9), net.named_parameters(),
                                   staleness=0)
    in_lockstep(net, optimizer, rank, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    in_lockstep(net, optimizer, rank, range(3, 6))
    wanted = weights(net)
    in_lockstep(net, optimizer, rank, range(2))
    optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    in_lockstep(net, optimizer, rank, range(3, 6))
    found = weights(net)
    changed = {name: each + 1 for name, each in optimizer.state_dict()["async"].items()}
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": [], "async": changed})
    assert all((a == b).all() for a, b in zip(found, weights(net))), "nothing has changed"
    optimizer.close()
    with pytest.raises(bpsfast.MismatchError, match="not an AsyncOptimizer's"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    return all((a == b).all() for a, b in zip(found, wanted))


def test_a_resumed_optimizer_has_the_same_bits_where_the_order_does_not_matter(shared_job):
    assert shared_job(ranks=(1, 1), transport="tcp").run(resumed, timeout_s=120) == [True, True]


def not_together():
    net = model(0)
    errors = []
    for options in (dict(cross_barrier=True), dict(compression=bps.Compression.fp16)):
        try:
            bps.DistributedOptimizer(optimizer_of(net), net.named_parameters(), **options)
        except bpsfast.UnsupportedError as exc:
            errors.append(str(exc))
    try:
        bps.AsyncOptimizer(optimizer_of(net), list(net.named_parameters())[:1])
    except bpsfast.ConfigError as exc:
        errors.append(str(exc))
    return errors


def test_what_does_not_go_together(ranks):
    for errors in ranks.run(not_together):
        assert len(errors) == 3 and all("no gradients travel" in error for error in errors[:2])
        assert "3 of 4 parameters" in errors[2]
