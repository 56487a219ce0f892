"""DistributedDataParallel of all kinds of modules: branches, several models, recomputed, compiled, any output."""
from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bpsfast.torch as bps
from bpsfast.torch.parallel import DistributedDataParallel
from tests.support.averaged_gradients import assert_close, averages, batch, gradients, loss_of, network

pytestmark = pytest.mark.matrix


class Branches(torch.nn.Module):
    """Uses the parameters that its input selects."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            setattr(self, name, torch.nn.Parameter(torch.ones(2, dtype=torch.float64)))
        self.frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)

    def forward(self, names, factor):
        return sum(getattr(self, name) * factor for name in names) * self.frozen


def branches():
    model = Branches()
    ddp = DistributedDataParallel(model)
    last = bps.size() - 1
    for step in range(3):
        ddp.zero_grad()
        factor = bps.rank() + step + 1.0
        ddp("ab" if bps.rank() == last else "a", factor).sum().backward()
        mean = sum(rank + step + 1.0 for rank in range(bps.size())) / bps.size()
        assert model.a.grad.tolist() == [mean] * 2
        assert model.b.grad.tolist() == [(last + step + 1.0) / bps.size()] * 2
        assert model.c.grad is None  # on no rank
        assert model.frozen.grad is None


def test_parameters_without_a_gradient(everywhere):
    everywhere.run(branches)


def absent():
    """A rank whose loss does not use the model takes part by synchronize; on the others that does nothing."""
    model = Branches()
    ddp = DistributedDataParallel(model)
    for step in range(3):
        ddp.zero_grad()
        out = ddp("abc", step + 1.0)
        (torch.ones(2, requires_grad=True) if bps.rank() else out).sum().backward()
        ddp.synchronize()
        assert model.a.grad.tolist() == [(step + 1.0) / bps.size()] * 2


def test_a_rank_that_does_not_use_the_model(everywhere):
    everywhere.run(absent)


def two_models():
    """Two models in each backward pass, in another order on odd ranks; one parameter of each is used by some only."""
    models = [Branches(), Branches()]
    first, second = map(DistributedDataParallel, models)
    odd = bps.rank() % 2
    for step in range(3):
        for model in (first, second):
            model.zero_grad()
        inner, outer = (second, first) if odd else (first, second)
        # outer: b has no gradient on odd ranks; inner: c has none on even ranks
        value = outer("a" if odd else "ab", inner("abc" if odd else "ab", 2.0)).sum() + outer("c", 1.0 + step).sum()
        value.backward()
        wanted = {first: 0.0, second: 0.0}
        for rank in range(bps.size()):
            rank_inner, rank_outer = (second, first) if rank % 2 else (first, second)
            n_inner, n_outer = (3, 1) if rank % 2 else (2, 2)
            wanted[rank_inner] += 2.0 * n_outer
            wanted[rank_outer] += 2.0 * n_inner
        for model in (first, second):
            assert model.module.a.grad.tolist() == pytest.approx([wanted[model] / bps.size()] * 2), step


def test_two_models_in_one_backward_pass(everywhere):
    everywhere.run(two_models)


class Opaque:
    """An output of a class that is unknown to DistributedDataParallel."""

    def __init__(self, value):
        self.value = value


class Tied(torch.nn.Module):
    """A layer of its own, and one that another module has, too; its output is hidden."""

    def __init__(self, tied):
        super().__init__()
        self.own, self.tied = torch.nn.Parameter(torch.ones(2, dtype=torch.float64)), tied

    def forward(self, factor):
        return Opaque((self.own * self.tied * factor).sum())


def tied_models(is_frozen):
    tied = torch.nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=not is_frozen)
    models = [Tied(tied), Tied(tied)]
    wrapped = [DistributedDataParallel(model) for model in models]
    mean = sum(rank + 1.0 for rank in range(bps.size())) / bps.size()
    for _ in range(3):
        for model in models:
            model.zero_grad()
        sum(ddp(bps.rank() + 1.0).value for ddp in wrapped).backward()
        assert [model.own.grad.tolist() for model in models] == [[mean] * 2] * 2
        assert is_frozen or tied.grad.tolist() == [2 * mean] * 2


@pytest.mark.parametrize("is_frozen", [False, True])
def test_two_models_with_a_common_parameter(everywhere, is_frozen):
    everywhere.run(tied_models, is_frozen)


class Recomputing(torch.nn.Module):
    """Saves no activations between its layers: the backward pass computes them again."""

    def __init__(self, is_reentrant):
        super().__init__()
        self.inner = network(seed=4)
        self.is_reentrant = is_reentrant

    def forward(self, x):
        for layer in (self.inner[0], self.inner[1:]):
            x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return x


def recomputes():
    for is_reentrant in (True, False):
        model = Recomputing(is_reentrant)
        ddp = DistributedDataParallel(model)
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(bps.rank(), step).requires_grad_()).square().sum().backward()
            assert_close(gradients(model), averages(model.inner, steps=(step,)))


def test_checkpoints_that_compute_again(everywhere):
    everywhere.run(recomputes)


def nested():
    """A model in a nested pass of another one's: the nested pass ends its step, but not the other's."""
    outer, inner = network(seed=10), torch.nn.Linear(3, 3).double()
    ddp_outer, ddp_inner = DistributedDataParallel(outer), DistributedDataParallel(inner)
    for step in range(3):
        outer.zero_grad()
        inner.zero_grad()
        x = batch(bps.rank(), step).requires_grad_()
        ddp_outer(checkpoint(ddp_inner, x, use_reentrant=True)).square().sum().backward()
        both = torch.nn.Sequential(inner, outer)
        assert_close(gradients(both), averages(both, steps=(step,)))


def test_a_model_that_is_computed_again_within_another(everywhere):
    everywhere.run(nested)


def compiled():
    for step in range(3):
        models = network(seed=11), network(seed=12)
        whole = torch.compile(DistributedDataParallel(models[0]), backend="aot_eager")
        inside = DistributedDataParallel(torch.compile(models[1], backend="aot_eager"))
        for ddp, model in zip((whole, inside), models):
            loss_of(ddp, bps.rank(), step).backward()
            assert_close(gradients(model), averages(model, steps=(step,)))


def test_compiled_models(job):
    job(ranks=(2,)).run(compiled)


Pair = namedtuple("Pair", ["number", "out"])


@dataclass
class Answer:
    out: torch.Tensor


class Wrapped(torch.nn.Module):
    """Returns its output in some container."""

    def __init__(self, wrap):
        super().__init__()
        self.inner = network(seed=6)
        self.unused = torch.nn.Parameter(torch.ones(1))
        self.wrap = wrap

    def forward(self, *, x):
        return self.wrap(self.inner(x))


CONTAINERS = {
    "tensor": (lambda out: out, lambda got: got), "list": (lambda out: [1, [out]], lambda got: got[1][0]),
    "dict": (lambda out: OrderedDict(a=out), lambda got: got["a"]),
    "named tuple": (lambda out: Pair(1, out), lambda got: got.out), "dataclass": (Answer, lambda got: got.out),
}


def contained():
    for wrap, unwrap in CONTAINERS.values():
        model = Wrapped(wrap)
        ddp = DistributedDataParallel(model)
        out = unwrap(ddp(x=batch(bps.rank())))
        out.mul_(1)  # in place, after the hook
        out.square().sum().backward()
        assert_close(gradients(model.inner), averages(model.inner))


def test_outputs_in_containers(everywhere):
    everywhere.run(contained)


class Hidden(torch.nn.Module):
    """Returns an object in which tensors cannot be found."""

    def __init__(self):
        super().__init__()
        self.inner = network(seed=7)

    def forward(self, x):
        return type("Box", (), {"out": self.inner(x)})


def hidden():
    model = Hidden()
    ddp = DistributedDataParallel(model)
    for step in range(2):
        ddp.zero_grad()
        ddp(batch(bps.rank(), step)).out.square().sum().backward()
        assert_close(gradients(model), averages(model.inner, steps=(step,)))


def test_outputs_that_are_not_found(everywhere):
    everywhere.run(hidden)


def frozen():
    ddp = DistributedDataParallel(network().requires_grad_(False))
    x = batch(bps.rank()).requires_grad_()
    ddp(x).sum().backward()
    ddp.synchronize()
    assert x.grad is not None


def test_a_module_that_is_not_trained(everywhere):
    everywhere.run(frozen)
