"""DistributedOptimizer on real ranks against one process that sees all samples."""
from __future__ import annotations

import numpy as np
import pytest
import torch

import bpsfast.torch as bps
from bpsfast.torch.compression import Compression
from bpsfast.trainer import process

pytestmark = pytest.mark.matrix

N_RANKS = 3
N_STEPS = 4


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, as on the ranks: the number of threads changes the order of torch's own sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network():
    torch.manual_seed(3)
    norm = torch.nn.BatchNorm2d(6, track_running_stats=False)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 6, 3), norm, torch.nn.ReLU(), torch.nn.Flatten(),
                               torch.nn.Linear(6 * 36, 10))


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 1, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def loss_of(net, step, rank, autocast=False):
    x, y = batch(step, rank)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return torch.nn.functional.cross_entropy(net(x).float(), y)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def average_gradients(net, step, ranks, autocast=False, passes=1, nodes=None):
    """Return the mean over *ranks* of each parameter's gradient: partial sums of each node, then these in order."""
    by_rank = []
    for rank in ranks:
        total = [torch.zeros_like(p) for p in net.parameters()]
        for number in range(passes):
            net.zero_grad()
            loss_of(net, step * passes + number, rank, autocast).backward()
            total = [p.grad.clone() if number == 0 else t + p.grad for t, p in zip(total, net.parameters())]
        by_rank.append(total)
    nodes = nodes or [list(range(len(by_rank)))]
    result = []
    for number in range(len(by_rank[0])):
        partials = []
        for node in nodes:
            partial = by_rank[node[0]][number].clone()
            for rank in node[1:]:
                partial += by_rank[rank][number]
            partials.append(partial)
        total = partials[0]
        for partial in partials[1:]:
            total = total + partial
        result.append(torch.from_numpy(total.numpy() / np.float32(len(by_rank))))
    net.zero_grad()
    return result


def single(n_ranks, nodes, clip=None, autocast=False, passes=1):
    """Train in one process, without bpsfast."""
    net = network()
    optimizer = sgd(net)
    for step in range(N_STEPS):
        for p, mean in zip(net.parameters(), average_gradients(net, step, range(n_ranks), autocast, passes, nodes)):
            p.grad = mean
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return [p.detach().numpy().tobytes() for p in net.parameters()]


def train(clip=None, autocast=False, passes=1, set_to_none=True, named=True):
    net = network()
    names = net.named_parameters() if named else None
    optimizer = bps.DistributedOptimizer(sgd(net), names, backward_passes_per_step=passes)
    bps.broadcast_parameters(net.state_dict(), 0)
    for step in range(N_STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for number in range(passes):
            loss_of(net, step * passes + number, bps.rank(), autocast).backward()
        if clip is None:
            optimizer.step()
            continue
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        with optimizer.skip_synchronize():
            optimizer.step()
    return [p.detach().numpy().tobytes() for p in net.parameters()]


VARIANTS = [{}, {"clip": 0.5}, {"autocast": True}, {"passes": 3}, {"set_to_none": False},
            {"set_to_none": False, "clip": 0.5, "passes": 2}, {"named": False}]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", ["two", "three"])
def test_training_equals_a_single_process(request, shape, variant):
    job = request.getfixturevalue(shape)
    nodes = [[0, 1]] if shape == "two" else [[0, 1], [2]]
    want = single(job.size, nodes, **{k: v for k, v in variant.items() if k in ("clip", "autocast", "passes")})
    for parameters in job.run(lambda_free_train, variant):
        assert parameters == want


def lambda_free_train(variant):
    return train(**variant)


def amp():
    """GradScaler: synchronize before unscale_, step inside skip_synchronize."""
    net = network()
    optimizer = bps.DistributedOptimizer(sgd(net), net.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, step, bps.rank())).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return [p.detach().numpy().tobytes() for p in net.parameters()]


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="this torch scales no gradients on the CPU")
def test_a_gradient_scaler(two):
    want = single(2, [[0, 1]])  # the scale is a power of two
    assert two.run(amp) == [want] * 2


def closures():
    net = network()
    optimizer = bps.DistributedOptimizer(sgd(net), net.named_parameters())
    losses = []
    for step in range(N_STEPS):
        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(net, step, bps.rank())
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    return len(losses), [p.detach().numpy().tobytes() for p in net.parameters()]


def test_closures(two):
    want = single(2, [[0, 1]])
    assert two.run(closures) == [(N_STEPS, want)] * 2


def compressed(kind):
    net = network()
    named = [(f"{kind} {name}", p) for name, p in net.named_parameters()]
    optimizer = bps.DistributedOptimizer(sgd(net), named, compression=getattr(Compression, kind))
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss_of(net, step, bps.rank()).backward()
        optimizer.step()
    return [p.detach().numpy() for p in net.parameters()]


@pytest.mark.parametrize(("kind", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2)])
def test_compressed_gradients(two, kind, tolerance):
    exact = [np.frombuffer(raw, "f4") for raw in single(2, [[0, 1]])]
    first, second = two.run(compressed, kind)
    for a, b, want in zip(first, second, exact):
        assert a.tobytes() == b.tobytes()
        assert np.abs(a.ravel() - want).max() < tolerance


def unused():
    """A parameter that only rank 0 uses, one that no rank uses, one that is frozen."""
    used, unused, frozen = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    frozen.requires_grad_(False)
    named = [("used", used), ("unused", unused), ("frozen", frozen)]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([used, unused, frozen], lr=1.0), named)
    if bps.rank() == 0:
        (used * 3).sum().backward()
    optimizer.step()
    return used.tolist(), used.grad.tolist(), unused.grad, frozen.grad


def test_parameters_without_a_gradient_contribute_zeros(three):
    """One that has a gradient on no rank gets none, as in one process."""
    assert three.run(unused) == [([0.0] * 3, [1.0] * 3, None, None)] * 3


def strided():
    """A channels_last weight, an embedding, a parameter used twice, float64 beside float32."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    shared = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    table = torch.nn.Embedding(7, 3)
    parameters = [*conv.parameters(), shared, *table.parameters()]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), None)
    x = torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last) * (bps.rank() + 1)
    loss = conv(x).sum() + (shared * shared * (bps.rank() + 1)).sum() + table(torch.tensor([bps.rank(), 6])).sum()
    loss.backward()
    optimizer.step()
    strides = conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
    return conv.weight.grad.sum().item(), strides, shared.grad.tolist(), table.weight.grad[:, 0].tolist()


def test_any_layout_and_dtype(three):
    third = pytest.approx(1 / 3)
    for total, strides, shared, rows in three.run(strided):
        assert total == 2 * 36 * 108 * 2 and strides and shared == [4.0] * 5
        assert rows == [third, third, third, 0, 0, 0, 1.0]


def where_gradients_live(set_to_none):
    net = network()
    optimizer = bps.DistributedOptimizer(sgd(net), net.named_parameters())
    session = process.current()
    inside = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(net, step, bps.rank()).backward()
        optimizer.step()
        inside.append(all(session.memory.locate(p.grad.data_ptr(), 4) is not None for p in net.parameters()))
    return inside


def test_kept_gradients_live_in_the_segment(two):
    assert two.run(where_gradients_live, True) == [[False] * 3] * 2
    assert two.run(where_gradients_live, False) == [[False, True, True]] * 2


def takes_over():
    net = network()
    original = torch.optim.Adam(net.parameters(), lr=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(original, 1, gamma=0.5)
    optimizer = bps.DistributedOptimizer(original, net.named_parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, step, bps.rank()).backward()
        optimizer.step()
        scheduler.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    loss_of(net, 2, bps.rank()).backward()
    optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    return isinstance(optimizer, torch.optim.Adam), type(optimizer).__name__, rate, len(calls)


def test_the_wrapper_takes_over(two):
    assert two.run(takes_over) == [(True, "Adam", 0.0625, 3)] * 2


def scheduled():
    net = network()
    optimizer = bps.DistributedOptimizer(sgd(net), net.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, step, bps.rank()).backward()
        optimizer.step()
        scheduler.step()
    return optimizer.param_groups[0]["lr"]


def test_schedulers(two):
    assert two.run(scheduled) == [0.1 / 8] * 2


def wrapped_again():
    net = network()
    last = None
    for step in range(4):
        optimizer = bps.DistributedOptimizer(sgd(net), net.named_parameters())
        optimizer.zero_grad()
        loss_of(net, step, bps.rank()).backward()
        optimizer.step()
        last = [p.grad.clone() for p in net.parameters()]
    return len(last), sum(len(p._post_accumulate_grad_hooks or ()) for p in net.parameters())


def test_a_model_may_be_wrapped_again(two):
    n = len(list(network().parameters()))
    assert two.run(wrapped_again) == [(n, n)] * 2


def misuse(kind):
    net = network()
    named = list(net.named_parameters())
    wrap = bps.DistributedOptimizer
    if kind == "duplicate":
        wrap(sgd(net), [("same", p) for _, p in named])
    if kind == "unnamed":
        wrap(sgd(net), named[1:])
    if kind == "pairs":
        wrap(sgd(net), list(net.parameters()))
    if kind == "passes":
        wrap(sgd(net), named, backward_passes_per_step=0)
    optimizer = wrap(sgd(net), named)
    if kind == "wrapped":
        wrap(optimizer, named)
    if kind == "group":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    try:
        loss_of(net, 0, 0).backward()
        if kind == "backward":
            loss_of(net, 0, 0).backward()
        if kind == "zero_grad":
            optimizer.zero_grad()
    finally:
        optimizer.step()


@pytest.mark.parametrize(("kind", "error", "text"), [
    ("duplicate", "ConfigError", "same more than once"), ("unnamed", "ConfigError", "not in named_parameters"),
    ("pairs", "ConfigError", "pairs"), ("passes", "ConfigError", "backward_passes_per_step must be > 0, got 0"),
    ("wrapped", "ConfigError", "already"), ("group", "UnsupportedError", "before"),
    ("backward", "BusyError", "backward_passes_per_step=1"), ("zero_grad", "UnderWayError", "before optimizer.step()"),
])
def test_misuse(two, kind, error, text):
    for outcome in two.attempt(misuse, kind):
        assert outcome.error == error and text in outcome.text, outcome


def sparse():
    table = torch.nn.Embedding(7, 3, sparse=True)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), [("sparse", table.weight)],
                                         cross_barrier=True)
    try:
        table(torch.tensor([1])).sum().backward()
    finally:
        table.weight.grad = None
        optimizer.step()


def test_sparse_gradients_are_refused_with_cross_barrier(two):
    for outcome in two.attempt(sparse):
        assert outcome.error == "UnsupportedError" and "sparse=False" in outcome.text


def alone():
    net = network()
    optimizer = bps.DistributedOptimizer(sgd(net), net.named_parameters())
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss_of(net, step, 0).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    return [p.detach().numpy().tobytes() for p in net.parameters()]


def test_one_rank(job):
    assert job(ranks=(1,)).run(alone) == [single(1, [[0]])]
