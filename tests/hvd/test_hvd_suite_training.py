"""Cases for each test of optimizers, states and objects in Horovod's test_torch.py, under the same names.

Written anew: what is expected is computed by one process from all ranks' gradients.
"""
from __future__ import annotations

import copy
import inspect
import itertools
import warnings

import pytest
import torch

import bpsfast.hvd as hvd
from tests.support.hvd_suite import CASES, FLOATS, case, own_set, ranks as ranks, refused, run_case

pytestmark = pytest.mark.timeout(300)

#: Horovod leaves these out, too: the state of one is closures, the other takes sparse gradients only.
LEFT_OUT = ("LBFGS", "SparseAdam")
OPTIMIZERS = sorted((kind for kind in torch.optim.Optimizer.__subclasses__()
                     if kind.__module__.startswith("torch.optim") and kind.__name__ not in LEFT_OUT),
                    key=lambda kind: kind.__name__)
OPTIONS = ({"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "centered": True}, {"lr": 0.02})


def taken(kind, options):
    """Return those of *options* that the optimizer *kind* has."""
    return {name: value for name, value in options.items() if name in inspect.signature(kind.__init__).parameters}


def network(kind=torch.optim.SGD):
    """Two layers, with biases unless the optimizer *kind* is for matrices only (Muon)."""
    bias = kind.__name__ != "Muon"
    return torch.nn.Sequential(torch.nn.Linear(6, 5, bias), torch.nn.ReLU(), torch.nn.Linear(5, 2, bias))


def loss_of(model, rank, step=0):
    x = torch.rand(4, 6, generator=torch.Generator().manual_seed(rank + 10 * step))
    return model(x).square().sum() * (rank + 1)


def wrapped(kind, options, model, **arguments):
    return hvd.DistributedOptimizer(kind(model.parameters(), **taken(kind, options)),
                                    named_parameters=model.named_parameters(), **arguments)


def alike(seed=3, kind=torch.optim.SGD):
    """A network with the same parameters on all ranks."""
    torch.manual_seed(seed)
    return network(kind)


def trained_by_one(model, optimizer, ranks, n_steps):
    """Train *model* by the mean of the gradients of *ranks*."""
    for step in range(n_steps):
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, rank, step) / len(ranks)).backward()
        optimizer.step()


def close(a, b):
    return all(torch.allclose(x.float(), y.float(), rtol=1e-4, atol=1e-5)
               for x, y in zip(a.parameters(), b.parameters(), strict=True))


def described(optimizer):
    """The state, with tensors as lists, and the options."""
    def plain(x):
        if isinstance(x, torch.Tensor):
            return x.dtype, x.tolist()
        return {key: plain(value) for key, value in x.items()} if isinstance(x, dict) else x

    return plain(optimizer.state_dict())


# -- broadcasts -------------------------------------------------------------------------------------------

@case("test_broadcast_state")
def states():
    """Rank 0 trains and saves; a new model and optimizer get what it has loaded, on all ranks, and train alike."""
    for kind, options in itertools.product(OPTIMIZERS, OPTIONS):
        model = alike(kind=kind)
        optimizer = wrapped(kind, options, model)
        loss_of(model, hvd.rank()).backward()
        optimizer.step()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        kept = hvd.broadcast_object((saved, described(optimizer)))

        torch.manual_seed(100 + hvd.rank())
        model = network(kind)
        optimizer = wrapped(kind, options, model)
        if hvd.rank() == 0:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(torch.equal(value, kept[0][0][name]) for name, value in model.state_dict().items()), kind
        assert described(optimizer) == kept[1], kind


@case("test_broadcast_state_options")
def options():
    first = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.2, "nesterov": True, "betas": (0.9, 0.999),
             "etas": (0.8, 2.4), "step_sizes": (1e-5, 100)}
    others = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": False, "betas": (0.8, 0.9),
              "etas": (0.25, 1.75), "step_sizes": (1e-7, 5)}
    for kind in OPTIMIZERS:
        model = alike(kind=kind)
        optimizer = wrapped(kind, others if hvd.rank() else first, model)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, hvd.rank()).backward()
            optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            found = {name: optimizer.param_groups[0][name] for name in taken(kind, first)}
            assert found == taken(kind, first) and [type(value) for value in found.values()] == [
                type(value) for value in taken(kind, first).values()], kind


@case("test_broadcast_state_no_grad")
def state_of_a_fresh_optimizer():
    """Frozen parameters get no gradient; the others get zeros, as of Horovod, and do not move (as there they do)."""
    frozen = torch.nn.Parameter(torch.tensor([1, 3], dtype=torch.int32), requires_grad=False)
    p = torch.nn.Parameter(torch.rand(4))
    optimizer = torch.optim.SGD([frozen, p], lr=0.5, weight_decay=0.5, momentum=0.9, nesterov=True)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("frozen", frozen), ("p", p)])
    hvd.broadcast_parameters({"frozen": frozen, "p": p}, root_rank=0)
    kept = p.detach().clone()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert frozen.grad is None and torch.equal(p, kept)
    assert torch.equal(hvd.broadcast(p.grad, root_rank=0), torch.zeros(4))


EVERYTHING = {"hello": 123, 0: [1, 2], "nothing": None, "tensor": None}


@case("test_broadcast_object")
def objects():
    assert hvd.broadcast_object(EVERYTHING if hvd.rank() == 0 else {}, root_rank=0) == EVERYTHING
    assert hvd.broadcast_object(None if hvd.rank() == 1 else 7, root_rank=1) is None


@case("test_broadcast_object_process_sets")
def objects_in_a_set():
    with own_set() as mine:
        root = mine.ranks[-1]
        found = hvd.broadcast_object((root, EVERYTHING) if hvd.rank() == root else {}, root, process_set=mine)
        assert found == (root, EVERYTHING)


@case("test_allgather_object")
def objects_of_all():
    mine = {"metric": hvd.rank()} | ({"more": 42} if hvd.rank() == 1 else {})
    assert hvd.allgather_object(mine) == [{"metric": 0}, {"metric": 1, "more": 42}, {"metric": 2}]


@case("test_compression_fp16")
def compression():
    for dtype in (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        x = torch.ones((5, 5, 5), dtype=dtype)
        small, context = hvd.Compression.fp16.compress(x)
        assert small.dtype == (torch.float16 if dtype.is_floating_point else dtype)
        assert torch.equal(hvd.Compression.fp16.decompress(small, context), x)


# -- DistributedOptimizer ---------------------------------------------------------------------------------

class TwoHeads(torch.nn.Module):
    """Two layers, of which each rank uses one."""

    def __init__(self, kind):
        super().__init__()
        bias = kind.__name__ != "Muon"
        torch.manual_seed(5)
        self.body = torch.nn.Linear(6, 5, bias)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(5, 2, bias) for _ in range(2)])

    def forward(self, rank):
        x = torch.rand(4, 6, generator=torch.Generator().manual_seed(rank))
        return self.heads[min(rank, 1)](torch.relu(self.body(x))).square().sum()


@case("test_force_allreduce")
def gradients_that_some_ranks_lack():
    """A parameter that this rank has not used gets the mean of the other ranks' gradients, and zeros."""
    for kind, options in itertools.product(OPTIMIZERS, OPTIONS):
        model, expected = TwoHeads(kind), TwoHeads(kind)
        optimizer = wrapped(kind, options, model)
        model(hvd.rank()).backward()
        optimizer.step()
        for rank in range(hvd.size()):
            (expected(rank) / hvd.size()).backward()
        kind(expected.parameters(), **taken(kind, options)).step()
        assert close(model, expected), kind


@case("test_duplicate_names")
def names_that_are_there_twice():
    both = [network(), network()]
    optimizer = torch.optim.SGD(itertools.chain(*(each.parameters() for each in both)), lr=0.1)
    names = itertools.chain(*(each.named_parameters() for each in both))
    assert "must be unique" in refused(ValueError, hvd.DistributedOptimizer, optimizer, named_parameters=names)


@case("test_missing_named_parameters")
def parameters_without_a_name():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())[:1]
    assert "not named" in refused(ValueError, hvd.DistributedOptimizer, optimizer, named_parameters=named)


@case("test_no_named_parameters")
def no_names_at_all():
    model, expected = alike(), alike()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    trained_by_one(expected, torch.optim.SGD(expected.parameters(), lr=0.02), range(hvd.size()), 3)
    assert close(model, expected)


@case("test_optimizer_no_named_parameters")
def the_names_of_parameters():
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    names = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))._parameter_names
    assert {p: names[p] for p in model.parameters()} == names and len(set(names.values())) == 4
    assert hvd.allgather_object(sorted(names.values())) == [sorted(names.values())] * hvd.size()
    given = wrapped(torch.optim.SGD, {"lr": 0.1}, model)
    assert given._parameter_names == {p: name for name, p in model.named_parameters()}


@case("test_dynamic_requires_grad")
def turns():
    """A generator and a discriminator train in turns: the other one is frozen meanwhile, and does not move."""
    models = [alike(), torch.nn.Linear(2, 1)]
    hvd.broadcast_parameters(models[1].state_dict(), 0)
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9),
                                           [(f"turns {i}.{name}", p) for name, p in each.named_parameters()])
                  for i, each in enumerate(models)]
    for turn in range(6):
        for i, model in enumerate(models):
            model.requires_grad_(i == turn % 2)
            optimizers[i].zero_grad()
        before = copy.deepcopy([[*each.parameters()] for each in models])
        x = torch.rand(4, 6, generator=torch.Generator().manual_seed(hvd.rank()))
        models[1](models[0](x)).sum().backward()
        for i, model in enumerate(models):
            for p in model.parameters():
                assert (p.grad is not None and bool(p.grad.any())) == (i == turn % 2)
        optimizers[turn % 2].step()
        moved = [any(not torch.equal(p, q) for p, q in zip(each.parameters(), kept))
                 for each, kept in zip(models, before)]
        assert moved == [turn % 2 == 0, turn % 2 == 1]
        for each in models:
            for p in each.parameters():
                assert torch.equal(p, hvd.broadcast(p.detach(), 0))


@case("test_gradient_clipping")
def clipping():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.zeros_(model.bias)
    optimizer = wrapped(torch.optim.SGD, {"lr": 0.1}, model)
    (model(torch.ones(1, 1)) - 1).square().mul(hvd.rank() + 1).sum().backward()
    optimizer.synchronize()
    assert model.weight.grad.item() == pytest.approx(-2.0)  # the mean of -1, -2 and -3
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    clipped = model.weight.grad.item()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert abs(clipped) < 0.1 and model.weight.item() == pytest.approx(0.5 - 0.1 * clipped)


@case("test_synchronize_step_warning")
def a_step_that_synchronizes_twice():
    model = alike()
    optimizer = wrapped(torch.optim.SGD, {"lr": 0.1}, model)
    loss_of(model, hvd.rank()).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["optimizer.step() called without optimizer.skip_synchronize()" in str(each.message) for each in found] == [
        True]


@case("test_sparse_embeddings")
def sparse_gradients():
    for as_dense in (False, True):
        torch.manual_seed(2)
        model = torch.nn.Embedding(10, 3, sparse=True)
        expected = copy.deepcopy(model)
        words = [torch.tensor(each) for each in ([[1, 2, 4, 5], [4, 3, 2, 9]], [[1, 3, 4], [4, 7, 9]], [[0, 1, 2]])]
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, [(f"sparse {as_dense}", model.weight)],
                                             sparse_as_dense=as_dense)
        model(words[hvd.rank()]).square().sum().backward()
        optimizer.step()
        sum(expected(each).square().sum() / hvd.size() for each in words).backward()
        expected.weight.grad = expected.weight.grad.coalesce()
        torch.optim.SparseAdam(list(expected.parameters()), lr=0.1).step()
        assert close(model, expected)


@case("test_optimizer_process_sets")
def training_in_a_set():
    """Ranks of the set train by its mean; the others by their own gradients."""
    few = hvd.add_process_set([0, 2])
    model, expected = alike(), alike()
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    optimizer = wrapped(torch.optim.SGD, options, model, process_set=few)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    ranks = few.ranks if few.included() else [hvd.rank()]
    trained_by_one(expected, torch.optim.SGD(expected.parameters(), **options), ranks, 3)
    assert close(model, expected)
    hvd.remove_process_set(few)


# ---------------------------------------------------------------------------------------------------------

def run(name):
    torch.set_num_threads(1)
    run_case(name)


@pytest.mark.parametrize("name", [name for name, function in CASES.items() if function.__module__ == __name__])
def test_case(ranks, name):
    ranks.run(run, name, timeout_s=250.0)
