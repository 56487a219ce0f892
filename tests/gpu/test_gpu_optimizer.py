"""DistributedOptimizer and bpsfast's DistributedDataParallel with a model on the GPU: averages have the CPU's bits."""
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import bpsfast  # noqa: E402
import bpsfast.torch as bps  # noqa: E402
from bpsfast.bench.device import digits, profiled  # noqa: E402
from bpsfast.orchestration.errors import BpsError  # noqa: E402
from tests.gpu.place import WHERE  # noqa: E402

N_STEPS = 5


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 1100), torch.nn.ReLU(), torch.nn.Linear(1100, 1000), torch.nn.ReLU(),
                               torch.nn.Linear(1000, 10)).to(WHERE)


def loss_of(model, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 64, generator=generator), torch.randint(0, 10, (8,), generator=generator)
    return torch.nn.functional.cross_entropy(model(x.to(WHERE)).float(), y.to(WHERE))


def by_the_cpu(gradient, name):
    """Return the average of a copy in shared memory, which no device has anything to do with."""
    shared = bpsfast.empty(tuple(gradient.shape), str(gradient.dtype).removeprefix("torch."))
    shared[...] = gradient.detach().cpu().numpy()
    return torch.from_numpy(bpsfast.push_pull(shared, name=f"by the CPU {name}").copy())


def trained(way, narrow):
    """Train by *way*; after each step compare the averages with the CPU's."""
    model = network()
    local = {}  # what was computed here: the hook comes before the optimizer's
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: local.update({p: p.grad.detach().clone()}))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = [(f"{way} {narrow} {name}", p) for name, p in model.named_parameters()]
    compression = {"": bps.Compression.none, "float16": bps.Compression.fp16, "bfloat16": bps.Compression.bf16}[narrow]
    optimizer = bps.DistributedOptimizer(sgd, named_parameters=named, compression=compression)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss_of(model, step, bps.rank()).backward()
        optimizer.synchronize()
        for name, p in named:
            sent = local[p].to(getattr(torch, narrow)) if narrow else local[p]
            if narrow != "bfloat16":  # NumPy has none
                want = by_the_cpu(sent, name).to(p.dtype)
                assert torch.equal(p.grad.cpu(), want), (step, name)
            assert p.grad.device.type == WHERE
        with optimizer.skip_synchronize():
            optimizer.step()
    return [p.detach().cpu().double().sum().item() for p in model.parameters()]


@pytest.mark.parametrize("narrow", ["", "float16", "bfloat16"])
def test_averages_are_the_cpus_to_the_bit(gpu_job, narrow):
    first, second = gpu_job.run(trained, "optimizer", narrow)
    assert first == second


def plainly(cross_barrier):
    """Return a model's weights after some steps with and without *cross_barrier*."""
    model = network()
    named = [(f"plainly {cross_barrier} {name}", p) for name, p in model.named_parameters()]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=named,
                                         backward_passes_per_step=2, cross_barrier=cross_barrier)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        for number in range(2):
            loss_of(model, 2 * step + number, bps.rank()).backward()
        optimizer.step()
    if cross_barrier:
        optimizer.settle()
    return [p.detach().cpu().numpy() for p in model.parameters()]


def test_two_passes_each_and_steps_that_cross_the_barrier(gpu_job):
    plain, crossing = gpu_job.run(plainly, False), gpu_job.run(plainly, True)
    for a, b, c, d in zip(*plain, *crossing):
        assert a.tobytes() == b.tobytes() and c.tobytes() == d.tobytes() and abs(a - c).max() < 1e-4


def by_the_model():
    model = bps.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        if step == 2:
            with model.no_sync():
                loss_of(model, 100, bps.rank()).backward()
        loss_of(model, step, bps.rank()).backward()
        optimizer.step()
    return [p.detach().cpu().numpy().tobytes() for p in model.parameters()]


def test_bpsfasts_distributed_data_parallel(gpu_job):
    first, second = gpu_job.run(by_the_model)
    assert first == second


def given():
    torch.manual_seed(bps.rank())
    model = torch.nn.Linear(300, 300).to(WHERE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + bps.rank()))
    model(torch.ones(2, 300, device=WHERE)).sum().backward()
    optimizer.step()
    bps.broadcast_parameters(model.state_dict(), root_rank=1)
    bps.broadcast_optimizer_state(optimizer, root_rank=1)
    state = [value.cpu() for each in optimizer.state.values() for value in each.values()]
    return [p.detach().cpu().numpy().tobytes() for p in model.parameters()] + [v.numpy().tobytes() for v in state]


def test_broadcasts(gpu_job):
    first, second = gpu_job.run(given)
    assert first == second


def test_a_real_model(gpu_job):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    for found in gpu_job.run(_digits):
        assert found["n_averages"] == 160 and found["ranks_agree"], found
        assert not found["n_differing"] and not found["n_differing_parameters"], found


def _digits():
    return digits.train(WHERE, 20)._asdict()


@pytest.mark.cuda
def test_no_thread_of_a_backward_pass_waits_for_the_gpu(gpu_job):
    for found in gpu_job.run(profiled.measure):
        assert found["sees_waits"] and found["n_hooks"] and not found["waits"], found


def mixed():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).cuda())
    named = [(f"mixed {name}", p) for name, p in model.named_parameters()]
    try:
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=named)
        for _ in range(2):
            optimizer.zero_grad()
            model[1](model[0](torch.ones(4)).cuda()).sum().backward()
            optimizer.step()
    except BpsError as exc:
        return f"{type(exc).__name__}: {exc}"
    return [p.detach().cpu().numpy().tobytes() for p in model.parameters()]


@pytest.mark.cuda
def test_a_model_half_on_the_cpu_works_or_is_refused_in_words(gpu_job):
    first, second = gpu_job.run(mixed)
    assert first == second or ("on cuda:0" in first and "the CPU" in first)
