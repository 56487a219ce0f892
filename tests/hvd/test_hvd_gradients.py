"""Gradients of bpsfast.hvd's operations: against finite differences where they are derivatives of the sum of all
ranks' losses, else against Horovod's definition."""
from __future__ import annotations

import pytest
import torch

import bpsfast.hvd as hvd
from tests.support.hvd_ranks import of_shapes

pytestmark = pytest.mark.matrix

ranks = of_shapes((1,), (3,), (2, 2))


def weights(shape, salt=0):
    return (torch.arange(int(torch.tensor(shape).prod())).reshape(shape).double() + 1) * (hvd.rank() + 2 + salt) / 10


def total_loss(function, x):
    """Return the sum of all ranks' losses at *x*, which differs by rank."""
    y = function(x)
    return hvd.allreduce((y * weights(tuple(y.shape))).sum(), op=hvd.Sum).item()


def differs_from_differences(function, x):
    """Return whether backward differs from finite differences of the sum of all losses, at each rank's *x* in turn."""
    x = x.clone().requires_grad_()
    y = function(x)
    (y * weights(tuple(y.shape))).sum().backward()
    found = torch.zeros_like(x)
    step = 1e-4
    for rank in range(hvd.size()):
        for i in range(hvd.broadcast(torch.tensor(x.numel()), rank).item()):  # all ranks evaluate, one moves
            losses = []
            for sign in (1, -1):
                moved = x.detach().clone()
                if hvd.rank() == rank:
                    moved.view(-1)[i] += sign * step
                losses.append(total_loss(function, moved))
            if hvd.rank() == rank:
                found.view(-1)[i] = (losses[0] - losses[1]) / (2 * step)
    return [] if torch.allclose(found, x.grad, rtol=1e-4, atol=1e-6) else [(found, x.grad)]


def point(*shape):
    torch.manual_seed(7 + hvd.rank())
    return torch.rand(shape, dtype=torch.float64) + 0.5


def reductions(op):
    wrong = differs_from_differences(lambda x: hvd.allreduce(x, op=op), point(2, 2))
    wrong += differs_from_differences(
        lambda x: hvd.allreduce(x, op=op, prescale_factor=-2.0, postscale_factor=0.5), point(3))
    return wrong + differs_from_differences(
        lambda x: torch.cat(hvd.grouped_allreduce([x[:1], x[1:].reshape(2, 1).t().reshape(-1)], op=op)), point(3))


@pytest.mark.parametrize("op", ["Average", "Sum", "Min", "Max", "Product"])
def test_allreduce(ranks, op):
    assert ranks.run(reductions, int(getattr(hvd, op))) == [[]] * ranks.size


def ties():
    x = torch.tensor([1.0, float(hvd.rank()), 0.0], requires_grad=True)
    hvd.allreduce(x, op=hvd.Max).sum().backward()
    last = hvd.rank() == hvd.size() - 1
    zero = torch.zeros(2, requires_grad=True)
    hvd.allreduce(zero + torch.tensor([0.0, 1.0 if hvd.rank() else 0.0]), op=hvd.Product).sum().backward()
    return x.grad.tolist() == [1.0, hvd.size() * last, 1.0] and zero.grad.tolist()[1] == (
        hvd.size() if hvd.rank() == 0 else 0)


def test_equal_maxima_share_the_gradient_and_products_with_a_zero_have_one(ranks):
    assert ranks.run(ties) == [True] * ranks.size


def alltoalls():
    n, me = hvd.size(), hvd.rank()
    splits = torch.tensor([(me + other) % 2 for other in range(n)], dtype=torch.int32)
    n_rows = int(splits.sum()) + 1  # one goes nowhere
    wrong = differs_from_differences(lambda x: hvd.alltoall(x, splits)[0], point(n_rows, 2))
    return wrong + differs_from_differences(lambda x: hvd.alltoall(x), point(n, 1))


def test_alltoall(ranks):
    assert ranks.run(alltoalls) == [[]] * ranks.size


def by_definition():
    """Check the gradients that Horovod defines as those of the mean of the losses, or n times those of their sum."""
    wrong = []
    n, me = hvd.size(), hvd.rank()
    x = point(me + 1, 2).requires_grad_()
    y = hvd.allgather(x)
    (y * weights(tuple(y.shape))).sum().backward()
    every = sum((torch.arange(y.numel()).reshape(y.shape).double() + 1) * (rank + 2) / 10 for rank in range(n)) / n
    begin = me * (me + 1) // 2
    if not torch.allclose(x.grad, every[begin:][: me + 1]):
        wrong.append("allgather")
    pair = [point(1).requires_grad_(), point(2, 1).requires_grad_()]
    first, second = hvd.grouped_allgather(pair)
    (first.sum() + 2 * second.sum()).backward()
    if pair[0].grad.tolist() != [1.0] or pair[1].grad.tolist() != [[2.0], [2.0]]:
        wrong.append("grouped allgather")
    x = point(3).requires_grad_()
    y = hvd.broadcast(x, n - 1)
    (y * weights((3,))).sum().backward()
    mean = sum((torch.arange(3).double() + 1) * (rank + 2) / 10 for rank in range(n)) / n
    if not torch.allclose(x.grad, mean if me == n - 1 else torch.zeros(3, dtype=torch.float64)):
        wrong.append("broadcast")
    for op, factor in ((hvd.Average, 1), (hvd.Sum, n)):
        x = point(n + 1).requires_grad_()
        y = hvd.reducescatter(x, op=op, prescale_factor=3.0)
        (y * (me + 1)).sum().backward()
        expected = torch.cat([torch.full(((n + 1) // n + (rank < (n + 1) % n),), 3.0 * factor * (rank + 1))
                              for rank in range(n)]).double()
        if not torch.allclose(x.grad, expected):
            wrong.append(f"reducescatter {op}")
    return wrong


def test_horovods_definitions(ranks):
    assert ranks.run(by_definition) == [[]] * ranks.size


def through_compression():
    x = torch.full((4,), 2.0, requires_grad=True)
    hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum).sum().backward()
    return x.grad.tolist() == [float(hvd.size())] * 4 and x.grad.dtype == torch.float32


def test_through_compression(ranks):
    assert ranks.run(through_compression) == [True] * ranks.size


def normalised():
    """Compare SyncBatchNorm on each rank's part of a batch with BatchNorm on the whole batch."""
    wrong = []
    n, me = hvd.size(), hvd.rank()
    for dims, affine, momentum in (((), True, 0.1), ((3,), True, None), ((2, 2), False, 0.3)):
        torch.manual_seed(3)
        parts = [torch.randn(rank + 2, 4, *dims, dtype=torch.float64) * 3 + 5 for rank in range(n)]
        kind = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d}[len(dims)]
        whole = kind(4, affine=affine, momentum=momentum).double()
        ours = hvd.SyncBatchNorm(4, affine=affine, momentum=momentum).double()
        for _ in range(2):
            x = torch.cat(parts).requires_grad_()
            y = whole(x)
            factors = torch.arange(y.numel()).reshape(y.shape).double().cos()
            whole.zero_grad()
            (y * factors).sum().backward()
            begin = sum(rank + 2 for rank in range(me))
            mine = parts[me].clone().requires_grad_()
            found = ours(mine)
            ours.zero_grad()
            (found * factors[begin:][: me + 2]).sum().backward()
            if not torch.allclose(found, y[begin:][: me + 2]) or not torch.allclose(
                    mine.grad, x.grad[begin:][: me + 2], atol=1e-8):
                wrong.append(f"batch {dims}")
            if affine and not torch.allclose(hvd.allreduce(ours.weight.grad, op=hvd.Sum), whole.weight.grad):
                wrong.append(f"weight {dims}")
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            if not torch.allclose(getattr(ours, name), getattr(whole, name)):
                wrong.append(f"{name} {dims}")
        if not torch.allclose(ours.eval()(parts[me]), whole.eval()(parts[me])):
            wrong.append(f"evaluation {dims}")
    half = hvd.SyncBatchNorm(4)(torch.ones(2, 4).half())
    return wrong + ([] if half.dtype == torch.float16 else ["float16"])


def test_sync_batch_norm_is_batch_norm_of_the_whole_batch(ranks):
    assert ranks.run(normalised) == [[]] * ranks.size
