"""Codecs from every API of bpsfast.torch give the bits of the NumPy reference, learning rates included."""
from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

import bpsfast.torch as bps
from bpsfast.orchestration.errors import ConfigError
from bpsfast.torch.compression import Compression, check_compression, check_compressor, parted
from bpsfast.trainer import process
from tests.support.compressed_rounds import Replay, values

SHAPE = (300, 100)
TOP = Compression.topk(0.05, error_feedback=True)
RATES = (0.5, 0.25, 0.25, 0.125)
RATIOS = (1.0, 2.0, 1.0, 2.0)


@pytest.fixture
def nodes(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def replayed(codec, stride, seed, ratios=RATIOS, average=True):
    replay = Replay(codec, SHAPE[0] * SHAPE[1], "float32", stride, (2, 1))
    return [replay.round([values(seed, rank, step, SHAPE, "float32") for rank in range(3)], average, ratio)
            for step, ratio in enumerate(ratios)]


def drawn(seed, step, shape=SHAPE):
    return torch.from_numpy(values(seed, bps.rank(), step, shape, "float32"))


class Net(torch.nn.Module):
    """Its gradients are the inputs of its last pass."""

    def __init__(self) -> None:
        super().__init__()
        self.big = torch.nn.Parameter(torch.zeros(SHAPE))
        self.other = torch.nn.Parameter(torch.zeros(SHAPE))
        self.small = torch.nn.Parameter(torch.zeros(7, 3))

    def forward(self, step):
        return sum((p * drawn(seed, step, p.shape)).sum() for seed, p in enumerate(self.parameters()))


CHOICE = {"*big": TOP, "*other": None, "*small": Compression.onebit()}


def named(model, label):
    return [(f"{label}.{name}", p) for name, p in model.named_parameters()]


def groups_of(model):
    """Two groups, whose learning rates change differently."""
    return [{"params": [model.big, model.small]}, {"params": [model.other], "lr": 1.0}]


def optimized(label, cross_barrier):
    model, found = Net(), []
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(groups_of(model), lr=RATES[0]), named(model, label),
                                         compression=CHOICE, cross_barrier=cross_barrier)
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model(step).backward()
        optimizer.synchronize()
        found.append([p.grad.numpy().copy() for p in model.parameters()])
        with optimizer.skip_synchronize():
            optimizer.step()
    units = [process.current().tensors.unit(f"Gradient.{name}") for name, _ in named(model, label)]
    return found, [None if unit.codec is None else unit.codec.kind for unit in units], units[0].stride


@pytest.mark.parametrize("cross_barrier", [False, True])
def test_optimizer_by_names_with_the_learning_rates_of_its_groups(nodes, cross_barrier):
    for found, kinds, stride in nodes.run(optimized, f"optimized {cross_barrier}", cross_barrier):
        assert kinds == ["topk", None, None], "the small one is below min_compress_bytes"
        for step, want in enumerate(replayed(TOP, stride, 0)):
            big, other, _ = found[step]
            assert big.tobytes() == want.tobytes(), f"step {step}"
            assert np.allclose(other, sum(values(1, rank, step, SHAPE, "float32") for rank in range(3)) / 3, atol=1e-6)


def crossing(label, cross_barrier):
    model = Net()
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(groups_of(model), lr=RATES[0]), named(model, label),
                                         compression=CHOICE, cross_barrier=cross_barrier)
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    if cross_barrier:
        optimizer.settle()
    return [p.detach().numpy().copy() for p in model.parameters()]


def test_steps_that_cross_the_barrier_have_the_same_weights(nodes):
    plain, crossed = (nodes.run(crossing, f"crossing {how}", how) for how in (False, True))
    for a, b in zip(plain, crossed):
        assert [x.tobytes() for x in a] == [x.tobytes() for x in b]


def by_the_module(label, rejoins):
    model = Net()
    if rejoins:  # a module like the other one would get its memory
        model.more = torch.nn.Parameter(torch.zeros(3))
    ddp, found = bps.DistributedDataParallel(model, compression={"big": TOP}), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0])
    ddp.follow_learning_rates(optimizer)
    if rejoins:  # as in the next job of an elastic program
        ddp.rejoin()
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        ddp(step).backward()
        found.append(model.big.grad.numpy().copy())
    return found, process.current().tensors.unit(ddp._exchange.prefix + "big").stride


@pytest.mark.parametrize("rejoins", [False, True])
def test_module_with_the_learning_rates_of_an_optimizer(nodes, rejoins):
    for found, stride in nodes.run(by_the_module, "module", rejoins):
        for step, want in enumerate(replayed(TOP, stride, 0)):
            assert found[step].tobytes() == want.tobytes(), f"step {step}"


def by_calls(label):
    found = {}
    for step, rate in enumerate(RATES):
        x = {call: drawn(0, step) for call in ("new", "inplace", "async", "async inplace")}
        how = {"compression": TOP, "learning_rate": rate}
        got = [bps.push_pull(x["new"], name=f"{label} 0", **how),
               bps.push_pull_inplace(x["inplace"], name=f"{label} 1", **how),
               bps.synchronize(bps.push_pull_async(x["async"], name=f"{label} 2", **how)),
               bps.synchronize(bps.push_pull_async_inplace(x["async inplace"], name=f"{label} 3", **how))]
        assert (x["new"] == drawn(0, step)).all() and (x["inplace"] == got[1]).all()
        found[step] = [each.numpy().copy() for each in got]
    return found, process.current().tensors.unit(f"{label} 0").stride


def test_calls(nodes):
    for found, stride in nodes.run(by_calls, "calls"):
        for step, want in enumerate(replayed(TOP, stride, 0)):
            assert [each.tobytes() for each in found[step]] == [want.tobytes()] * 4, f"step {step}"


def differentiated(label):
    found = []
    for step in range(3):
        x = drawn(0, step).requires_grad_()
        y = bps.push_pull(x, name=label, compression={label: TOP})
        y.backward(drawn(1, step))
        found.append((y.detach().numpy().copy(), x.grad.numpy().copy()))
    return found, process.current().tensors.unit(label).stride


def test_backward_of_a_call_keeps_its_own_error(nodes):
    for found, stride in nodes.run(differentiated, "differentiated"):
        for step, (forward, backward) in enumerate(zip(replayed(TOP, stride, 0, (1, 1, 1)),
                                                       replayed(TOP, stride, 1, (1, 1, 1)))):
            assert found[step][0].tobytes() == forward.tobytes()
            assert found[step][1].tobytes() == backward.tobytes()


MOMENTUM = 0.9


def with_momentum(label, codec, n_steps=4):
    """A codec with momentum and an optimizer without, where nothing is coded; torch's own, on sums made by hand."""
    found = []
    for make in (lambda ps: bps.DistributedOptimizer(
            torch.optim.SGD(ps.parameters(), lr=0.1), named(ps, label), codec), None):
        model = Net()
        optimizer = make(model) if make else torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM,
                                                             nesterov=True)
        for step in range(n_steps):
            optimizer.zero_grad()
            if make:
                model(step).backward()
            else:
                for seed, p in enumerate(model.parameters()):
                    p.grad = sum(torch.from_numpy(values(seed, rank, step, p.shape, "float32"))
                                 for rank in range(bps.size())) / bps.size()
            optimizer.step()
        found.append([p.detach().numpy().copy() for p in model.parameters()])
    return found


SIGNS = Compression.onebit(momentum=MOMENTUM)


@pytest.mark.parametrize(("shape", "codec", "alike"), [
    ((1,), SIGNS, (True, True, True)), ((2,), SIGNS, (True, True, True)), ((2, 1), SIGNS, (False, False, True)),
    ((2, 1), msgspec.structs.replace(SIGNS, auto=True), (True, True, True))], ids=["1", "2", "2+1", "2+1-auto"])
def test_what_is_not_coded_has_its_momentum_nevertheless(shared_job, shape, codec, alike):
    """In a job of one node nothing is coded; of one of two nodes what is large is sent as signs, if not only where it
    pays: nobody knows the rates of the NICs.
    """
    job = shared_job(ranks=shape, transport="tcp")
    for ours, own in job.run(with_momentum, f"momentum {codec.auto}", codec):
        assert tuple(np.allclose(a, b, atol=1e-5) for a, b in zip(ours, own)) == alike


def warned(label, momentum, codec_momentum):
    import warnings

    model = Net()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), named(model, label),
                                 Compression.onebit(momentum=codec_momentum))
    return [str(each.message) for each in found]


def test_two_momenta_are_warned_of(nodes):
    for texts in nodes.run(warned, "warned", 0.9, 0.5):
        assert len(texts) == 1 and "momentum (0.5)" in texts[0] and "make the optimizer with momentum=0" in texts[0]
    assert nodes.run(warned, "warned 2", 0.0, 0.5) == nodes.run(warned, "warned 3", 0.9, 0.0) == [[]] * 3


def refused(kind):
    model = Net()
    if kind == "integers":
        bps.push_pull(torch.zeros(SHAPE, dtype=torch.int64), name="refused", compression=TOP)
    if kind == "word":
        bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named(model, "refused"), "topk")
    if kind == "pattern":
        bps.DistributedDataParallel(model, compression={"big": "topk"})
    if kind == "rate":
        bps.push_pull_async(torch.zeros(SHAPE), name="refused", compression=TOP, learning_rate=float("nan"))


@pytest.mark.parametrize(("kind", "error", "text"), [
    ("integers", "UnsupportedError", "tensors of int64 are not compressed"),
    ("word", "ConfigError", "'topk' is no codec, and has no functions compress and decompress"),
    ("pattern", "ConfigError", "compression['big'] is 'topk'"), ("rate", "ConfigError", "learning_rate=nan")])
def test_what_is_refused(nodes, kind, error, text):
    for outcome in nodes.attempt(refused, kind):
        assert outcome.error == error and text in outcome.text


def test_what_is_a_compressor_and_what_a_codec():
    assert parted(Compression.fp16) == (Compression.fp16, None)
    assert parted(None) == (Compression.none, None)
    for choice in (TOP, {"*": TOP}, lambda name, shape, dtype: TOP):
        assert parted(choice) == (Compression.none, choice)
        with pytest.raises(ConfigError, match="no functions compress and decompress"):
            check_compressor(choice)
    half = type("Half", (), {"compress": staticmethod(lambda tensor: (tensor, None))})
    for wrong in (half, half(), dict, 5, "fp16", {"*": Compression.fp16}):
        with pytest.raises(ConfigError):
            check_compression(wrong)
    assert Compression.from_byteps({"compressor": "topk", "k": 0.05, "ef": "vanilla"}) == TOP
