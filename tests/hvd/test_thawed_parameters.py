"""Parameters that are frozen when they are wrapped, and thawed later, with every optimizer and wrapper."""
from __future__ import annotations

import pytest
import torch

import bpsfast
import bpsfast.hvd as hvd
import bpsfast.torch as bps
from bpsfast.torch.outer_optimizer import OuterOptimizer
from bpsfast.torch.parallel import DistributedDataParallel
from tests.support.hvd_ranks import begun


@pytest.fixture(scope="module")
def pair(shared_job):
    return begun(shared_job(ranks=(2,)))


class Looked(torch.nn.Module):
    """A table whose gradients are sparse, and a layer of ones."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = torch.nn.Embedding(8, 2, sparse=True), torch.nn.Linear(2, 1)
        torch.nn.init.constant_(self.layer.weight, 1.0)

    def forward(self, row):
        return self.layer(self.table(row)).sum()


def sparse(way, is_alone):
    """Return the gradients of the table's first rows after each step; *is_alone*: only rank 0 uses it in one step."""
    model, made = Looked(), {"bps": bps, "hvd": hvd}[way]
    model.table.requires_grad_(False)
    optimizer = made.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0),
                                          model.named_parameters(f"sparse {way} {is_alone}"))
    found = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 2 and is_alone and bps.rank():
            model.layer(torch.ones(1, 2)).sum().backward()
        else:
            model(torch.tensor([bps.rank()])).backward()
        optimizer.step()
        gradient = model.table.weight.grad
        found.append(None if gradient is None else (gradient.is_sparse, gradient[:2, 0].tolist()))
        model.table.requires_grad_(True)
    return found


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("way", ["bps", "hvd"])
def test_a_table_is_thawed(pair, way, is_alone):
    both = (False, [0.5, 0.5])
    assert pair.run(sparse, way, is_alone) == [[None, both, (False, [0.5, 0.0]) if is_alone else both, both]] * 2


class Coded(torch.nn.Module):
    """A layer, and constants of an unsupported dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.codes = torch.nn.Parameter(torch.zeros(4).to(dtype), requires_grad=False)


def constants(way, dtype_name):
    model = Coded(getattr(torch, dtype_name))
    named = list(model.named_parameters(f"{way} {dtype_name}"))
    if way == "ddp":
        optimizer, model.layer = torch.optim.SGD(model.parameters(), lr=0.0), DistributedDataParallel(model.layer)
    else:
        made = {"bps": bps, "hvd": hvd}[way]
        optimizer = made.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), named)
    model.layer(torch.full((1, 2), 1.0 + bps.rank())).sum().backward()
    optimizer.step()
    return next(model.layer.parameters()).grad.tolist(), model.codes.grad


@pytest.mark.parametrize("dtype_name", ["bool", "complex64", "float8_e4m3fn", "int16"])
@pytest.mark.parametrize("way", ["bps", "hvd", "ddp"])
def test_frozen_parameters_may_be_of_any_dtype(pair, way, dtype_name):
    assert pair.run(constants, way, dtype_name) == [([[1.5, 1.5]], None)] * 2


def unsummed(way):
    """A frozen parameter of an unsupported dtype gets a gradient."""
    model = Coded(torch.float8_e4m3fn)
    optimizer = {"bps": bps, "hvd": hvd}[way].DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(f"unsummed {way}"))
    if bps.rank():
        model.codes.requires_grad_(True)
        model.codes.grad = torch.ones(4).to(torch.float8_e4m3fn)
    model.layer(torch.ones(1, 2)).sum().backward()
    try:
        optimizer.step()
    except bpsfast.UnsupportedError as exc:
        return str(exc)
    return ""


@pytest.mark.parametrize("way", ["bps", "hvd"])
def test_a_gradient_of_such_a_dtype_is_refused_on_all_ranks(pair, way):
    for text in pair.run(unsummed, way):
        assert "float8" in text or "this dtype" in text


def model_of_two():
    """Return a body and a head, of equal values on all ranks."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))


def differently_frozen(way):
    model = model_of_two()
    model[0].requires_grad_(bps.rank() == 0)
    named = list(model.named_parameters(f"differently {way}"))
    optimizer, forward = torch.optim.SGD(model.parameters(), lr=0.0), model
    try:
        if way == "ddp":
            forward = DistributedDataParallel(model)
        else:
            options = {"cross_barrier": True} if way == "cross" else {}
            made = hvd if way == "hvd" else bps
            optimizer = made.DistributedOptimizer(optimizer, named, **options)
        forward(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    except bpsfast.BpsError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


@pytest.mark.parametrize("way", ["bps", "cross", "hvd", "ddp"])
def test_ranks_that_have_wrapped_others_frozen_are_refused_at_once(pair, way):
    for name, text in pair.run(differently_frozen, way, timeout_s=20):
        assert name == "MismatchError" and ("differs" in text or "Mismatched" in text)


def left_over():
    """The body is frozen after a backward pass, whose gradient it still has when the next optimizer begins."""
    model = model_of_two()
    for prefix in ("whole", "head alone"):
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                             model.named_parameters(f"left over, {prefix}"), cross_barrier=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.settle()
        model[0].requires_grad_(False)
    return [p.grad is None for p in model.parameters()]


def test_zero_grad_clears_what_was_frozen_before(pair):
    assert pair.run(left_over) == [[True, True, False, False]] * 2


def in_a_closure(way):
    """Return whether each step was refused before anything has changed."""
    model = model_of_two()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = OuterOptimizer(optimizer, model, 2) if way == "outer" else bps.AsyncOptimizer(
        optimizer, model.named_parameters("in a closure"))
    model[0].requires_grad_(True)
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        loss = model(torch.full((1, 4), 1.0 + bps.rank())).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        with pytest.raises(bpsfast.UnsupportedError, match="would stay this rank's"):
            optimizer.step(closure)
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    if way == "async":
        optimizer.close()
    return same


@pytest.mark.parametrize("way", ["outer", "async"])
def test_what_a_closure_has_thawed_is_refused_before_it_is_used(pair, way):
    assert pair.run(in_a_closure, way) == [True, True]
