"""Drawn sequences of changes to parameters: ranks train as one process would, or all raise the same error.

Sequences of freezing, thawing, adding, replacing, wrapping, unwrapping, accumulating, discarding and stepping are drawn
by their number. A failure prints the sequence; to play it again, call `check` with it.
"""
from __future__ import annotations

import gc
import random

import pytest
import torch

import bpsfast
import bpsfast.hvd as hvd
import bpsfast.torch as bps
from bpsfast.torch.parallel import DistributedDataParallel
from tests.support.hvd_ranks import begun

APIS = ("bps", "ddp", "cross", "hvd")
N_ORDINARY, N_THOROUGH = 40, 500
LAYERS = "abc"


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        for name in LAYERS:
            setattr(self, name, torch.nn.Linear(3, 3))

    def forward(self, x, used):
        for name in used:
            x = torch.tanh(getattr(self, name)(x))
        return x.square().sum()


def data(number, rank):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(31 * number + rank))


class Side:
    """A model and its optimizer in one process that computes for all *ranks*; the base of the classes for one rank."""

    def __init__(self, ranks, size):
        self.model, self.ranks, self.size = Net(), ranks, size
        self.frozen = {rank: set() for rank in range(size)}
        self.optimizer = None
        self.kept = []
        self.n_passes = 1
        self.n_batches = 0

    # -- operations ------------------------------------------------------------------------------------------------

    def freeze(self, layers, rank=None):
        for each in range(self.size) if rank is None else (rank,):
            self.frozen[each] |= set(layers)

    def thaw(self, layers):
        for frozen in self.frozen.values():
            frozen -= set(layers)

    def replace(self, layer, seed):
        """Only the model knows the new layer."""
        torch.manual_seed(seed)
        setattr(self.model, layer, torch.nn.Linear(3, 3))

    def put(self, layer, seed):
        """The optimizer knows it, too, in the place of the old one."""
        before = list(getattr(self.model, layer).parameters())
        self.replace(layer, seed)
        for old, new in zip(before, getattr(self.model, layer).parameters()):
            for group in self.optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]

    def add(self, seed):
        """A layer is added to the model, and to the optimizer."""
        self.replace("d", seed)
        self.optimizer.add_param_group({"params": list(self.model.d.parameters())})

    def wrap(self, layers, kind, n_passes, keeps):
        """Another optimizer, of parameters of *layers*; ranks have the same ones frozen."""
        alike = set.intersection(*self.frozen.values())
        self.frozen = {rank: set(alike) for rank in self.frozen}
        self.set_frozen(0)
        self.unwrap(keeps)
        self.n_passes = n_passes
        parameters = [p for name in layers if hasattr(self.model, name) for p in getattr(self.model, name).parameters()]
        self.optimizer = self.wrapped(torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.1) if kind == "sgd"
                                      else torch.optim.Adam(parameters, 0.01, weight_decay=0.1))

    def unwrap(self, keeps, uses=None):
        """The optimizer is gone, or somebody keeps it; a backward pass that nobody steps for."""
        self.kept = [*self.kept, self.optimizer] if keeps else []
        self.optimizer = None
        if uses:
            self.backward(uses)
            self.model.zero_grad()

    def train(self, uses, clears, settles):
        """A step, after a backward pass for each of *uses*: layers by rank."""
        self.clear(clears)
        for number, by_rank in enumerate(uses):
            self.backward(by_rank, is_last=number == len(uses) - 1)
        self.optimizer.step()

    def discard(self, uses):
        """A backward pass whose gradients are not used."""
        self.clear("none")
        for _ in range(self.n_passes):
            self.backward(uses)
        self.synchronize()
        self.clear("none")

    def begin_anew(self):
        """What a program does when something was refused: an optimizer of all parameters."""
        self.model.zero_grad()
        self.wrap("abcd", "sgd", self.n_passes, False)

    # -- parts of them ---------------------------------------------------------------------------------------------

    def set_frozen(self, rank):
        for name, layer in self.model.named_children():
            for p in layer.parameters():
                if p.requires_grad == (name in self.frozen[rank]):  # else cross_barrier would have nothing left to do
                    p.requires_grad_(not p.requires_grad)

    def clear(self, clears):
        if clears == "none":
            self.optimizer.zero_grad()
        elif clears == "zeros":
            self.optimizer.zero_grad(set_to_none=False)

    def backward(self, uses, is_last=True):
        self.n_batches += 1
        for rank in self.ranks:
            self.set_frozen(rank)
            loss = self.forward(data(self.n_batches, rank), [name for name in uses[rank] if hasattr(self.model, name)])
            if loss.requires_grad:
                (loss / len(self.ranks)).backward()

    def forward(self, x, used):
        return self.model(x, used)

    def wrapped(self, optimizer):
        return optimizer

    def synchronize(self):
        pass


class Rank(Side):
    """A rank that trains with the optimizers of *api*."""

    def __init__(self, api):
        super().__init__([bps.rank()], bps.size())
        self.api = api

    def wrapped(self, optimizer):
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(name, p) for name, p in self.model.named_parameters() if id(p) in known]
        made = hvd if self.api == "hvd" else bps
        options = {"cross_barrier": True} if self.api == "cross" else {}
        return made.DistributedOptimizer(optimizer, named, backward_passes_per_step=self.n_passes, **options)

    def synchronize(self):
        self.optimizer.synchronize()

    def train(self, uses, clears, settles):
        super().train(uses, clears, settles)
        if self.api == "cross" and settles:
            self.optimizer.settle()


class Parallel(Rank):
    """A rank that trains with DistributedDataParallel and torch's optimizers."""

    parallel = None

    def wrapped(self, optimizer):
        self.parallel = DistributedDataParallel(self.model)
        return optimizer

    def unwrap(self, keeps, uses=None):
        if keeps:
            self.kept.append(self.parallel)
        self.parallel = None
        super().unwrap(keeps, uses)

    def forward(self, x, used):
        return self.model(x, used) if self.parallel is None else self.parallel(x, used)

    def backward(self, uses, is_last=True):
        if self.parallel is None and not self.kept:  # a module that is kept averages the gradients of its parameters
            super().backward(uses)
        elif self.parallel is None:
            pass
        elif not is_last:
            with self.parallel.no_sync():
                super().backward(uses)
        else:
            super().backward(uses)
            self.parallel.synchronize()

    def synchronize(self):
        pass


def play(side, operations, refusals=None):
    """Run *operations*; return which were refused (for one process: as given), and all parameters."""
    told: list[str] = []
    for number, (what, *details) in enumerate(operations):
        side.n_batches = 100 * number
        error = refusals[number] if refusals else ""
        try:
            if not error:
                getattr(side, what)(*details)
            elif what == "add":
                side.replace("d", *details)
        except bpsfast.BpsError as exc:
            error = f"{type(exc).__name__}: {exc}"
            if type(exc) is not bpsfast.UnsupportedError:
                raise
        if error:
            side.begin_anew()
        told.append(error)
    if hasattr(side.optimizer, "settle"):
        side.optimizer.settle()
    return told, {name: p.detach().numpy().copy() for name, p in side.model.named_parameters()}


def played(api, operations):
    """Run the operations on a rank."""
    torch.set_num_threads(1)
    found = play((Parallel if api == "ddp" else Rank)(api), operations)
    gc.collect()
    return found


def draw(seed, n_ranks):
    """Return a sequence of operations."""
    rng = random.Random(seed)

    def layers(least=0):
        return "".join(sorted(rng.sample(LAYERS, rng.randint(least, 3))))

    def uses():
        """Layers by rank; in most passes all ranks use the same ones."""
        if rng.random() < 0.6:
            return ["abcd"] * n_ranks if rng.random() < 0.5 else [layers(1)] * n_ranks
        return [layers() + rng.choice(("", "d")) for _ in range(n_ranks)]

    def wrap():
        return "wrap", layers(1) if rng.random() < 0.5 else "abcd", rng.choice(("sgd", "adam")), rng.choice(
            (1, 1, 2, 3)), rng.random() < 0.3

    operations, is_risky, is_grown = [], False, False
    if rng.random() < 0.4:
        operations.append(("freeze", layers(1)))
        is_risky = True
    operations.append(wrap())
    n_passes = operations[-1][3]
    for _ in range(rng.randint(4, 9)):
        what = rng.choice(["freeze", "freeze", "thaw", "thaw", "wrap", "unwrap", "discard", "train", "train", "put",
                           "replace", "add"])
        seed = rng.randrange(1000)
        if what == "freeze":
            operations.append(("freeze", layers(1), rng.choice([None, None, rng.randrange(n_ranks)])))
        elif what == "thaw":
            operations.append(("thaw", layers(1)))
        elif what == "discard":
            operations.append(("discard", uses()))
        elif what in ("put", "replace"):
            operations.append((what, rng.choice(LAYERS), seed))
        elif what == "add" and not is_grown:
            operations.append(("add", seed))
            is_grown = True
        elif what in ("wrap", "unwrap"):
            if what == "unwrap":
                operations.append(("unwrap", rng.random() < 0.3, uses()))
            operations.append(wrap())
            n_passes = operations[-1][3]
        is_risky |= what in ("freeze", "thaw", "put", "replace", "add")
        for _ in range(rng.randint(1, 2)):
            n = rng.randint(1, n_passes)
            operations.append(("train", [uses() for _ in range(n)],
                               rng.choice(("none", "none", "zeros", "nothing")), is_risky or rng.random() < 0.3))
    return operations


def check(ranks, api, operations):
    """Run *operations* on all *ranks* and in one process; raise AssertionError if the results differ."""
    found = ranks.run(played, api, operations)
    refusals = [[bool(each) for each in told] for told, _ in found]
    assert all(each == refusals[0] for each in refusals), [told for told, _ in found]
    _, expected = play(Side(range(ranks.size), ranks.size), operations, found[0][0])
    for _, parameters in found:
        assert set(parameters) == set(expected)
        for name, value in expected.items():
            assert parameters[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def check_drawn(ranks, seeds):
    for seed in seeds:
        for api in APIS:
            operations = draw(seed, ranks.size)
            try:
                check(ranks, api, operations)
            except BaseException as exc:
                pytest.fail(f"check(ranks, {api!r}, {operations!r}) with {ranks.size} ranks, drawn by {seed}: {exc!r}")


@pytest.fixture(params=[2, 3])
def ranks(request, shared_job):
    return begun(shared_job(ranks=(request.param,)))


def test_sequences(ranks):
    n = N_ORDINARY // (2 * len(APIS))
    check_drawn(ranks, range(n * ranks.size, n * ranks.size + n))


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", range(8))
def test_many_sequences(ranks, chunk):
    n = -(-N_THOROUGH // (2 * len(APIS) * 8))
    first = 1000 + n * (8 * ranks.size + chunk)
    check_drawn(ranks, range(first, first + n))
