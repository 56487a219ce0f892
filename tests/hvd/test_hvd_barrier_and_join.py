"""barrier and join, alone and with operations and optimizers under way; ranks have different amounts of data."""
from __future__ import annotations

import threading
import time

import pytest
import torch

import bpsfast
import bpsfast.hvd as hvd
from tests.support.hvd_ranks import begun, of_shapes

pytestmark = pytest.mark.matrix

ranks = of_shapes((1,), (2,), (3,), (2, 2))


def barriers():
    is_first = hvd.rank() == 0
    handle = hvd.allreduce_async(torch.ones(1), name="after the barrier") if is_first else None
    hvd.barrier()
    waits = not is_first or hvd.size() == 1 or not hvd.poll(handle)
    hvd.barrier()
    hvd.synchronize(handle or hvd.allreduce_async(torch.ones(1), name="after the barrier"))
    for _ in range(20):
        hvd.barrier()
    return waits


def test_barrier(ranks):
    assert ranks.run(barriers) == [True] * ranks.size


def uneven(op, kinds):
    """Rank r has r batches. Return the results of its allreduces, and the last rank to join."""
    found = []
    for i in range(hvd.rank()):
        x = torch.full((2,), float(i + 1 + hvd.rank())).to(getattr(torch, kinds))
        found.append(hvd.allreduce(x, op=op, name=f"batch {i} {op} {kinds}").tolist())
    return found, hvd.join()


@pytest.mark.parametrize("kind", ["float32", "int64"])
@pytest.mark.parametrize("op", ["Sum", "Min", "Product"])
def test_ranks_that_have_joined_count_as_nothing(ranks, op, kind):
    n = ranks.size
    results = ranks.run(uneven, int(getattr(hvd, op)), kind)
    combine = {"Sum": sum, "Min": min, "Product": lambda values: torch.tensor(list(values)).prod().item()}[op]
    for rank, (found, last) in enumerate(results):
        expected = [combine([i + 1 + other for other in range(i + 1, n)]) for i in range(rank)]
        assert found == [[value] * 2 for value in expected]
        assert last == n - 1


def unnamed():
    sums = [hvd.allreduce(torch.ones(1), op=hvd.Sum).item() for _ in range(hvd.rank())]
    hvd.join()
    return sums, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()  # all count from the start again


def test_names_are_counted_anew_after_a_join(ranks):
    n = ranks.size
    assert ranks.run(unnamed) == [([float(n - 1 - i) for i in range(rank)], float(n)) for rank in range(n)]


def submitted_before():
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1), name="which is executed when all others have joined")
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="submitted before the join")
    last = hvd.join() if hvd.rank() else None
    value = hvd.synchronize(handle).item()
    return value, hvd.join() if last is None else last


def test_what_was_submitted_before_a_join_counts(ranks):
    assert ranks.run(submitted_before) == [(float(ranks.size), 0)] * ranks.size


def refused():
    if hvd.rank() == 0 and hvd.size() > 1:
        for function, text in (
                (lambda: hvd.allgather(torch.ones(1)), "Allgather is not supported with Join at this time."),
                (lambda: hvd.broadcast(torch.ones(1), 0), "Broadcast is not supported with Join at this time."),
                (lambda: hvd.alltoall(torch.ones(hvd.size())), "Alltoall is not supported with Join at this time."),
                (lambda: hvd.reducescatter(torch.ones(2)), "Reducescatter is not supported with Join")):
            with pytest.raises(hvd.HorovodInternalError, match=text):
                function()
    return hvd.join()


def test_other_operations_are_refused_while_a_rank_has_joined(ranks):
    assert ranks.run(refused) == [0] * ranks.size


def trained(title, op, steps):
    """Train a model for rank + 1 steps, twice, with a join after each; return its gradients and the last to join."""
    torch.manual_seed(1)
    models = [torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1)]
    optimizers = [hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), [(f"{title}.{i}.{name}", p) for name, p in
                                                      model.named_parameters()], op=op)
        for i, model in enumerate(models)]
    gradients, last = [], []
    for _ in range(2):
        for step in range(steps[hvd.rank()]):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x = torch.full((1, 3), float(10 * step + hvd.rank() + 1))
            (models[0](x).sum() + models[1](x[:, :2]).sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
            gradients.append((models[0].weight.grad[0, 0].item(), models[1].bias.grad.item()))
        last.append(hvd.join())
    return gradients, last


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("steps", [(1, 2, 3, 4), (2, 0, 4, 1)], ids=str)
def test_join_beside_optimizers(ranks, op, steps):
    n = ranks.size
    results = ranks.run(trained, f"{op} {steps}", int(getattr(hvd, op)), steps)
    divisor = n if op == "Average" else 1
    for rank, (gradients, last) in enumerate(results):
        expected = []
        for _ in range(2):
            for step in range(steps[rank]):
                there = [other for other in range(n) if steps[other] > step]
                expected.append((sum(10 * step + other + 1 for other in there) / divisor, len(there) / divisor))
        assert gradients == [pytest.approx(value) for value in expected]
        assert all(steps[each] == max(steps[:n]) for each in last)


def one_of_two_goes_on():
    """Rank 1 joins, rank 0 steps only the second optimizer; return their results and the threads that are left."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([each], lr=0.1), [(f"w{i}", each)])
                  for i, each in enumerate(weights)]
    for optimizer, weight in zip(optimizers, weights):
        weight.sum().backward()
        optimizer.step()
    end = time.monotonic() + 30
    error = ""
    try:
        if hvd.rank() == 1:
            hvd.join()
        while time.monotonic() < end:
            optimizers[1].zero_grad()
            weights[1].sum().backward()
            optimizers[1].step()
    except bpsfast.StallError as exc:
        error = str(exc)
    return error, [thread.name for thread in threading.enumerate() if "joined" in thread.name]


def test_a_join_that_fails_takes_part_in_nothing_more(job):
    own = begun(job(ranks=(2,), timeout_s=3))
    (first, _), (second, left) = own.run(one_of_two_goes_on)
    assert "rank 1" in first and "rank 0" in second
    assert left == []
    own.kill()
