"""DistributedDataParallel: backward returns with the averages of the gradients by which they are defined."""
from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bpsfast.torch as bps
from bpsfast.orchestration.errors import BusyError, ConfigError, MismatchError
from bpsfast.torch.compression import Compression, Compressor
from bpsfast.torch.parallel import DistributedDataParallel
from tests.every_shape import SHAPES

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def network(seed=0, dtype=torch.float64, bias=True):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4, bias=bias), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(dtype)


def batch(rank, step=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model, rank, step=0, dtype=torch.float64):
    return model(batch(rank, step, dtype)).square().sum()


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def assert_close(found, wanted, tolerance=1e-12):
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance), (a, b)


def averages(model, loss=loss_of, steps=(0,), dtype=torch.float64):
    """Return the gradients by definition: of the mean over all ranks of their losses."""
    model = copy.deepcopy(model)
    model.zero_grad()
    by_rank = []
    for rank in range(bps.size()):
        model.zero_grad()
        for step in steps:
            loss(model, rank, step, dtype).backward()
        by_rank.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
    return [sum(each.double() for each in found) / bps.size() for found in zip(*by_rank)]


def of_dtypes():
    for dtype in FLOATS:
        model = network(dtype=dtype)
        ddp = DistributedDataParallel(model)
        for step in range(3):
            ddp.zero_grad()
            loss_of(ddp, bps.rank(), step, dtype).backward()
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 3e-2)
            assert_close(gradients(model), averages(model, steps=(step,), dtype=dtype), tolerance)
            assert all(p.grad.dtype == dtype for p in model.parameters())


def test_gradients_of_all_dtypes(everywhere):
    everywhere.run(of_dtypes)


def by_differences():
    model = network(seed=1)
    ddp = DistributedDataParallel(model)
    loss_of(ddp, bps.rank()).backward()
    h = 1e-5
    with torch.no_grad():
        for p in model.parameters():
            flat, gradient = p.view(-1), p.grad.view(-1)
            for i in range(len(flat)):
                kept, sides = flat[i].item(), []
                for side in (h, -h):
                    flat[i] = kept + side
                    sides.append(sum(loss_of(model, rank).item() for rank in range(bps.size())) / bps.size())
                flat[i] = kept
                assert gradient[i].item() == pytest.approx((sides[0] - sides[1]) / (2 * h), rel=1e-6, abs=1e-6)


def test_gradients_are_finite_differences(everywhere):
    everywhere.run(by_differences)


class Normed(torch.nn.Module):
    """Buffers of several kinds, one of them not in the state; an integer one is drawn by each rank."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = torch.nn.BatchNorm1d(3)
        self.norm.running_mean.uniform_()
        self.register_buffer("drawn", torch.randint(0, 100, (4,), dtype=torch.int32))
        self.register_buffer("mask", torch.rand(3) < 0.5)
        self.register_buffer("left_out", torch.rand(2, 3).t(), persistent=False)

    def forward(self, x):
        return self.norm(x)


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def starts_alike():
    model = Normed(bps.rank())
    own, first = buffers_of(model), buffers_of(Normed(0))
    ddp = DistributedDataParallel(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, Normed(0).state_dict()[name]), name
    assert torch.equal(model.left_out, own["left_out"])
    ddp(torch.ones(2, 3) * (bps.rank() + 1))
    assert torch.equal(model.left_out, first["left_out"]) and not model.left_out.is_contiguous()
    model.drawn += bps.rank()
    ddp.eval()
    with torch.no_grad():
        ddp(torch.ones(2, 3))
    assert torch.equal(model.drawn, first["drawn"])
    # rank 0's statistics of its batch of ones, as BatchNorm makes them: 0.9 of the old ones and 0.1 of the mean
    assert torch.allclose(model.norm.running_mean, first["norm.running_mean"] * 0.9 + 0.1)
    assert model.norm.num_batches_tracked.item() == 1


def test_all_ranks_have_rank_0s_parameters_and_buffers(everywhere):
    everywhere.run(starts_alike)


def keeps_buffers():
    model = Normed(bps.rank())
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    model.drawn.fill_(bps.rank())
    ddp(torch.ones(2, 3))
    assert model.drawn.tolist() == [bps.rank()] * 4


def test_buffers_that_are_not_broadcast(everywhere):
    everywhere.run(keeps_buffers)


def accumulates():
    model = network(seed=2)
    ddp = DistributedDataParallel(model)
    for first in (0, 10):
        ddp.zero_grad()
        with ddp.no_sync():
            for step in (first, first + 1):
                loss_of(ddp, bps.rank(), step).backward()
            local = gradients(model)
            with ddp.no_sync():
                pass
            loss_of(ddp, bps.rank(), first + 2).backward()
        assert any(not torch.equal(a, b) for a, b in zip(local, gradients(model))), "it still adds up"
        loss_of(ddp, bps.rank(), first + 3).backward()
        assert_close(gradients(model), averages(model, steps=range(first, first + 4)))
    ddp.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, bps.rank()).backward()
    ddp.synchronize()
    wanted = averages(model)
    assert_close(gradients(model), wanted)
    ddp.synchronize()  # that was done
    assert_close(gradients(model), wanted)


def test_no_sync_adds_up(everywhere):
    everywhere.run(accumulates)


class Branches(torch.nn.Module):
    """Uses the parameters that it is told to."""

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
        assert (model.c.grad is None) if bps.size() == 1 else (model.c.grad.tolist() == [0.0] * 2)
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


def losses_apart():
    """Two forward passes, a backward pass for each; and a graph that is gone through twice."""
    model = network(seed=3)
    ddp = DistributedDataParallel(model)
    first, second = loss_of(ddp, bps.rank(), 0), loss_of(ddp, bps.rank(), 1)
    first.backward()
    second.backward(retain_graph=True)
    assert_close(gradients(model), averages(model, steps=(0, 1)))
    second.backward()
    assert_close(gradients(model), averages(model, steps=(0, 1, 1)))


def test_several_backward_passes(everywhere):
    everywhere.run(losses_apart)


class Recomputing(torch.nn.Module):
    """Keeps nothing between its layers for the backward pass, which computes it again."""

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
    """A model inside a pass within the pass of another: its step ends with the inner one, the other's does not."""
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


class Eighth(Compressor):
    """Sends an eighth as half, in another shape."""

    @staticmethod
    def compress(tensor):
        return (tensor.reshape(-1) / 8).half(), tensor

    @staticmethod
    def decompress(tensor, context):
        return tensor.to(context.dtype).mul_(8).reshape(context.shape)


def compressed():
    for compression in (Compression.none, Compression.fp16, Compression.bf16, Eighth, Eighth()):
        model = network(seed=5)
        ddp = DistributedDataParallel(model, compression=compression)
        tolerance = 1e-12 if compression is Compression.none or bps.size() == 1 else 5e-2
        for step in range(3):
            ddp.zero_grad()
            loss_of(ddp, bps.rank(), step).backward()
            assert_close(gradients(model), averages(model, steps=(step,)), tolerance)


def test_compressed_gradients(everywhere):
    everywhere.run(compressed)


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
    """Returns an object in which nobody finds tensors."""

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


def trains():
    """A model under DistributedDataParallel beside one process that sees all batches: the same state."""
    torch.manual_seed(bps.rank())
    model, alone = network(seed=bps.rank()), network(seed=0)
    ddp = DistributedDataParallel(model, device_ids=[bps.local_rank()])
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (ddp, alone)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(ddp, bps.rank(), step).backward()
        for p, mean in zip(alone.parameters(), averages(alone, steps=(step,))):
            p.grad = mean
        for optimizer in optimizers:
            optimizer.step()
    assert_close(model.parameters(), alone.parameters())
    state = ddp.state_dict()
    assert set(state) == {f"module.{name}" for name in model.state_dict()}
    other = DistributedDataParallel(network(seed=9))
    other.load_state_dict(state)
    assert_close(other.parameters(), model.parameters(), 0)


def test_training(everywhere):
    everywhere.run(trains)


def frozen():
    ddp = DistributedDataParallel(network().requires_grad_(False))
    x = batch(bps.rank()).requires_grad_()
    ddp(x).sum().backward()
    ddp.synchronize()
    assert x.grad is not None


def test_a_module_that_is_not_trained(everywhere):
    everywhere.run(frozen)


def made_again():
    """Wrapping again and again takes no more names than are used at a time."""
    prefixes, kept = [], []
    model = network()
    for _ in range(4):
        ddp = DistributedDataParallel(model)
        model.zero_grad()
        loss_of(ddp, bps.rank()).backward()
        assert_close(gradients(model), averages(model))
        if bps.size() > 1:
            prefixes.append(ddp._exchange.prefix)
        if bps.rank() % 2:
            kept.append(ddp)  # as somebody may: it is gone on rank 0, whose word counts
        del ddp
    kept.clear()
    beside = [DistributedDataParallel(network(bias=False)) for _ in range(2)]
    if bps.size() > 1:
        assert len(set(prefixes)) == 1
        assert len({each._exchange.prefix for each in beside} | set(prefixes)) == 3
    assert sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()) == 0


def test_a_module_may_be_wrapped_again(everywhere):
    everywhere.run(made_again)


def fails_between():
    """A backward pass that an exception ends: synchronize makes the step whole, and training goes on."""
    model = network(seed=8)
    ddp = DistributedDataParallel(model)
    loss_of(ddp, bps.rank()).backward()
    ddp.zero_grad()
    handle = model[0].register_full_backward_pre_hook(raise_it)
    with pytest.raises(ZeroDivisionError):
        loss_of(ddp, bps.rank()).backward()
    handle.remove()
    if bps.size() > 1:
        with pytest.raises(BusyError, match="synchronize"):
            loss_of(ddp, bps.rank()).backward()
    ddp.synchronize()
    ddp.zero_grad()
    loss_of(ddp, bps.rank()).backward()
    assert_close(gradients(model), averages(model))


def raise_it(*_):
    raise ZeroDivisionError


def test_a_backward_pass_that_fails(everywhere):
    everywhere.run(fails_between)


def differs():
    DistributedDataParallel(torch.nn.Linear(3, 4 + bps.rank() // 2))


def test_modules_that_differ(job):
    outcomes = job(ranks=(2, 1)).attempt(differs)
    assert outcomes[2].error == MismatchError.__name__ and "(5,)" in outcomes[2].text and "(4,)" in outcomes[2].text


def stalls():
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    for _ in range(2 if bps.rank() == 0 else 1):
        ddp(torch.ones(2, 3)).sum().backward()


def test_a_rank_that_makes_fewer_steps_is_named(job):
    broken = job(ranks=(2,), timeout_s=2)
    waits, leaves = broken.attempt(stalls)
    broken.kill()
    assert waits.error == "StallError" and "rank 1" in waits.text and not leaves.error, waits


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ({"device_ids": [0, 1]}, ConfigError, "a rank for each"), ({"compression": None}, ConfigError, "compress and"),
])
def test_arguments_that_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        DistributedDataParallel(torch.nn.Linear(2, 2), **arguments)


def test_shapes_are_those_of_one_to_four_ranks_on_one_and_two_nodes():
    wanted = {(n,) for n in (1, 2, 3, 4)} | {(1, 1), (2, 1), (2, 2)}
    assert set(SHAPES) == wanted and len(SHAPES) == len(wanted)
