"""Broadcasts of objects, parameters and optimizer states; allgather of objects."""
from __future__ import annotations

import pytest
import torch

import bpsfast.hvd as hvd
from tests.support.hvd_ranks import of_shapes

ranks = of_shapes((1,), (2,), (2, 1), (4,), fusion_bytes=1 << 20)


def objects():
    me, n = hvd.rank(), hvd.size()
    own = {"rank": me, "text": "x" * (10 ** me), "tensor": torch.full((me,), 2.0)}
    found = hvd.broadcast_object(own, root_rank=n - 1)
    every = hvd.allgather_object(own, name="every")
    return ((found["rank"], len(found["text"]), found["tensor"].tolist()),
            [(each["rank"], len(each["text"]), each["tensor"].tolist()) for each in every],
            hvd.broadcast_object(None if me else b"", 0, name="empty"), found is own)


def test_objects(ranks):
    n = ranks.size
    every = [(rank, 10 ** rank, [2.0] * rank) for rank in range(n)]
    assert ranks.run(objects) == [(every[-1], every, b"", rank == n - 1) for rank in range(n)]


def parameters(kind):
    """Broadcast a model of small, large, contiguous and strided tensors; return the names of wrong ones."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.ModuleDict({
        "norm": torch.nn.BatchNorm1d(3), "large": torch.nn.Linear(600, 600), "small": torch.nn.Linear(2, 3)})
    model["small"].weight = torch.nn.Parameter(torch.randn(2, 3).t())
    root = hvd.size() - 1
    torch.manual_seed(root)
    expected = torch.nn.ModuleDict({
        "norm": torch.nn.BatchNorm1d(3), "large": torch.nn.Linear(600, 600), "small": torch.nn.Linear(2, 3)})
    expected["small"].weight = torch.nn.Parameter(torch.randn(2, 3).t())
    if hvd.rank() == root:
        model["norm"].num_batches_tracked.fill_(7)
    expected["norm"].num_batches_tracked.fill_(7)
    if kind == "state":
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    elif kind == "named":
        named = [*model.named_parameters(), *model.named_buffers()]
        hvd.broadcast_parameters(named[::-1] if hvd.rank() else named, root_rank=root)  # matched by name
    else:
        hvd.broadcast_parameters(list(model.parameters()) + list(model.buffers()), root_rank=root)
    return [name for name, value in model.state_dict().items() if not value.equal(expected.state_dict()[name])]


@pytest.mark.parametrize("kind", ["state", "named", "tensors"])
def test_parameters(ranks, kind):
    assert ranks.run(parameters, kind) == [[]] * ranks.size


def states(name):
    """Broadcast an optimizer's state from rank 0, which has made steps; return state and options of all ranks."""
    torch.manual_seed(0)
    p = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    lr = 0.1 if hvd.rank() == 0 else 0.7
    optimizer = getattr(torch.optim, name)([{"params": p[:1], "lr": lr}, {"params": p[1:], "weight_decay": lr}], lr=0.3)
    wrapped = hvd.DistributedOptimizer(optimizer, [(f"{name}.{i}", each) for i, each in enumerate(p)])
    if hvd.rank() == 0:
        for each in p:
            each.grad = torch.ones_like(each)
        with wrapped.skip_synchronize():
            wrapped.step()
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    described = wrapped.state_dict()
    return str(described["param_groups"]), str(described["state"])


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_optimizer_states(ranks, name):
    first, *others = ranks.run(states, name)
    assert all(other == first for other in others)
    assert "0.1" in first[0] and (name == "SGD" or "tensor" in first[1])


def wrong_ones():
    with pytest.raises(ValueError, match=r"cannot broadcast torch\.optim\.LBFGS state"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]), 0)
    with pytest.raises(ValueError, match="invalid params of type: <class 'int'>"):
        hvd.broadcast_parameters(3, 0)
    with pytest.raises(ValueError, match="invalid params of type: 'a' is a float, no tensor"):
        hvd.broadcast_parameters({"a": 1.0}, 0)
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match=r"Mismatched BROADCAST tensor shapes: .*\[2\].*\[3\]|\[3\]"):
            hvd.broadcast_parameters({"a": torch.ones(1), "b": torch.ones(2 if hvd.rank() else 3)}, 0)
        first = hvd.rank() == 0
        for mine, text in (
                ({"yours" if first else "mine": torch.ones(1)}, "tensor names: .*sent yours,.*sent mine"),
                ({"a": torch.ones(1)} | ({} if first else {"more": torch.ones(1)}), "Only one of them sent more"),
                ({} if first else {"a": torch.ones(1)}, "group of 0 tensors.*Only one of them sent a")):
            with pytest.raises(hvd.HorovodInternalError, match=text):  # on all ranks
                hvd.broadcast_parameters(mine, 0)
    hvd.broadcast_parameters({}, 0)
    return True


def test_what_cannot_be_broadcast(ranks):
    assert ranks.run(wrong_ones) == [True] * ranks.size
