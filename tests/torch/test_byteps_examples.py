"""BytePS's own example programs for PyTorch (version 0.2.5) find what they import and call, on the CPU.

Each test names the programs of example/pytorch whose calls it makes, with their arguments, in their order; the models
are small.
"""
from __future__ import annotations

import importlib
import inspect
import timeit

import pytest
import torch
import torch.nn.functional as F

import bpsfast.torch as bps
from bpsfast.orchestration.errors import UnsupportedError

#: Modules that the programs import (below byteps.torch), and the names of theirs that they use.
USED = {
    "": ("init", "rank", "size", "local_rank", "local_size", "shutdown", "suspend", "resume", "declare", "push_pull",
         "push_pull_inplace", "byteps_push_pull", "poll", "synchronize", "Compression", "DistributedOptimizer",
         "broadcast_parameters", "broadcast_optimizer_state", "broadcast_object"),
    ".cross_barrier": ("init", "rank", "size", "local_rank", "Compression", "CrossBarrier", "broadcast_parameters",
                       "broadcast_optimizer_state"),
    ".parallel": ("DistributedDataParallel",),
    ".ops": ("push_pull_async_inplace", "poll", "synchronize", "push_pull", "push_pull_async", "push_pull_inplace",
             "push_pull_group_sync_inplace", "byteps_torch_set_num_grads", "declare", "init", "shutdown", "suspend",
             "resume", "size", "local_size", "rank", "local_rank"),
    ".compression": ("Compression", "Compressor", "NoneCompressor", "FP16Compressor"),
}


@pytest.mark.parametrize("module", USED)
def test_names(module):
    found = importlib.import_module(f"bpsfast.torch{module}")
    for name in USED[module]:
        assert callable(getattr(found, name)), name
    with pytest.raises(AttributeError):
        found.there_is_no_such_name  # noqa: B018


#: BytePS's signatures; ours may have more parameters behind.
SIGNATURES = {
    "init": "lazy=True", "shutdown": "", "suspend": "", "resume": "num_workers num_servers global_rank context=None",
    "declare": "name", "poll": "handle", "synchronize": "handle", "byteps_torch_set_num_grads": "num_grads_",
    **dict.fromkeys(("push_pull_async", "push_pull_async_inplace", "byteps_push_pull", "push_pull_inplace",
                     "push_pull_group_sync_inplace"), "tensor average=True name=None version=0 priority=0"),
    "push_pull": "tensor average=True name=None version=0 priority=0 compression=NoneCompressor",
    "DistributedOptimizer": "optimizer named_parameters=None compression=NoneCompressor backward_passes_per_step=1",
    "CrossBarrier": "model optimizer named_parameters=None compression=NoneCompressor backward_passes_per_step=1 "
                    "num_steps=1000000",
    "broadcast_parameters": "params root_rank prefix='Parameter.'",
    "broadcast_optimizer_state": "optimizer root_rank prefix='Parameter.'",
    "broadcast_object": "obj root_rank=0 name=None",
    "DistributedDataParallel": "module device_ids=None broadcast_buffers=True compression=NoneCompressor",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    shown = []
    for parameter in inspect.signature(getattr(bps, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        default = getattr(parameter.default, "__name__", repr(parameter.default))
        shown.append(parameter.name + ("" if parameter.default is parameter.empty else f"={default}"))
    assert " ".join(shown) == SIGNATURES[name]


class Net(torch.nn.Module):
    """Convolution, normalisation and a layer, as in the programs' models."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.fc = torch.nn.Linear(4 * 36, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return F.log_softmax(self.fc(F.dropout(x.view(-1, 4 * 36), training=self.training)), dim=1)


def data(n=8):
    torch.manual_seed(bps.rank() + 50)
    return torch.rand(n, 1, 8, 8), torch.LongTensor(n).random_() % 10


def states_agree(*models):
    """Whether all ranks have the same parameters, and have trained at all."""
    mine = [p.detach().clone() for model in models for p in model.parameters()]
    theirs = bps.broadcast_object(mine, 0)
    return all(torch.equal(a, b) and bool(torch.isfinite(a).all()) for a, b in zip(mine, theirs))


def benchmark(optimizer, model, n_steps):
    x, target = data()

    def benchmark_step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()

    return timeit.timeit(benchmark_step, number=n_steps)


def benchmark_byteps(fp16):
    bps.init()
    torch.manual_seed(bps.local_rank())
    model = Net()
    compression = bps.Compression.fp16 if fp16 else bps.Compression.none
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    named = [(f"benchmark {fp16} {name}", p) for name, p in model.named_parameters()]
    optimizer = bps.DistributedOptimizer(optimizer, named_parameters=iter(named), compression=compression)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    benchmark(optimizer, model, 3)
    with torch.autograd.profiler.profile(bps.rank() == 0):
        benchmark(optimizer, model, 2)
    return states_agree(model)


@pytest.mark.parametrize("fp16", [False, True])
def test_benchmark_byteps(two, fp16):
    assert two.run(benchmark_byteps, fp16) == [True] * 2


def benchmark_cross_barrier_byteps():
    crossing = importlib.import_module("bpsfast.torch.cross_barrier")
    crossing.init()
    torch.manual_seed(crossing.rank())
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    named = [(f"crossing {name}", p) for name, p in model.named_parameters()]
    optimizer = crossing.CrossBarrier(model, optimizer, named_parameters=named,
                                      compression=crossing.Compression.none, num_steps=2 + 3)
    crossing.broadcast_parameters(model.state_dict(), root_rank=0)
    crossing.broadcast_optimizer_state(optimizer, root_rank=0)
    benchmark(optimizer, model, 2)
    benchmark(optimizer, model, 3)
    return states_agree(model)


def test_benchmark_cross_barrier_byteps(two):
    assert two.run(benchmark_cross_barrier_byteps) == [True] * 2


def benchmark_byteps_ddp(broadcast_buffers):
    from bpsfast.torch.parallel import DistributedDataParallel as DDP

    torch.manual_seed(bps.rank())
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = DDP(model, device_ids=[bps.local_rank()], broadcast_buffers=broadcast_buffers)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    benchmark(optimizer, model, 3)
    model.train()
    x, target = data()
    output = model(x)
    loss = torch.nn.CrossEntropyLoss()(output, target)
    optimizer.zero_grad()
    loss.backward()
    model.synchronize()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(x)
    model.load_state_dict(model.state_dict())
    return states_agree(model)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_benchmark_byteps_ddp_and_train_imagenet_resnet_byteps_ddp(two, broadcast_buffers):
    assert two.run(benchmark_byteps_ddp, broadcast_buffers) == [True] * 2


def microbenchmark():
    from bpsfast.torch.ops import poll, push_pull_async_inplace, synchronize

    for size in (1, 10, 10**5):
        tensor = torch.full((size,), bps.rank() + 1.0)
        for _ in range(3):
            handle = push_pull_async_inplace(tensor, True, str(size))
            while not poll(handle):
                pass
            synchronize(handle)
        assert torch.equal(tensor, torch.full((size,), 1.5))


def test_microbenchmark_byteps(two):
    two.run(microbenchmark)


def train_mnist():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * bps.size(), momentum=0.5)
    named = [(f"mnist {name}", p) for name, p in model.named_parameters()]
    optimizer = bps.DistributedOptimizer(optimizer, named_parameters=named)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    sampler = torch.utils.data.distributed.DistributedSampler(range(10), num_replicas=bps.size(), rank=bps.rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for _ in sampler:
            x, target = data()
            optimizer.zero_grad()
            F.nll_loss(model(x), target).backward()
            optimizer.step()
        assert metric_average(bps.rank() + 1.0, "avg_loss") == 1.5
        tensor = torch.tensor(bps.rank() + 1.0)
        bps.declare("avg_accuracy")
        assert bps.push_pull_inplace(tensor, average=False, name="avg_accuracy").item() / bps.size() == 1.5
    return states_agree(model)


def metric_average(val, name):
    return bps.push_pull(torch.tensor(val), name=name).item()


def test_train_mnist_byteps(two):
    assert two.run(train_mnist) == [True] * 2


def train_imagenet(resumes):
    passes = 2
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * passes * bps.size(), momentum=0.9, weight_decay=5e-5)
    named = [(f"imagenet {resumes} {name}", p) for name, p in model.named_parameters()]
    optimizer = bps.DistributedOptimizer(optimizer, named_parameters=named, compression=bps.Compression.none,
                                         backward_passes_per_step=passes)
    if resumes and bps.rank() == 0:
        optimizer.load_state_dict(checkpoint_of(optimizer))
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    bps.declare(f"acc {resumes}")
    bps.synchronize(bps.byteps_push_pull(torch.empty(2).zero_(), name=f"acc {resumes}"))
    for step in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        optimizer.zero_grad()
        x, target = data(8)
        for i in range(0, 8, 4):
            loss = F.cross_entropy(model(x[i:i + 4]), target[i:i + 4])
            loss.div_(2)
            loss.backward()
        optimizer.step()
        handle = bps.byteps_push_pull(torch.FloatTensor([bps.rank(), 2.0]), name=f"acc {resumes}")
        assert bps.synchronize(handle).tolist() == [0.5, 2.0]
    return states_agree(model), optimizer.state_dict()["state"][0]["momentum_buffer"].sum().item()


def checkpoint_of(optimizer):
    """Return the state of another run: momentum in every parameter."""
    p = [torch.nn.Parameter(torch.zeros_like(p)) for group in optimizer.param_groups for p in group["params"]]
    other = torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=5e-5)
    for each in p:
        each.grad = torch.ones_like(each)
    other.step()
    return other.state_dict()


@pytest.mark.parametrize("resumes", [False, True])
def test_train_imagenet_resnet50_byteps(two, resumes):
    first, second = two.run(train_imagenet, resumes)
    assert first == second and first[0]


def elastic():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    named = [(f"elastic {name}", p) for name, p in model.named_parameters()]
    bps.DistributedOptimizer(optimizer, named_parameters=named)
    with pytest.raises(UnsupportedError, match="start it again with the new numbers"):
        bps.suspend()  # the program's last act; nothing is lost of what was trained


def test_elastic_benchmark_byteps(two):
    two.run(elastic)
