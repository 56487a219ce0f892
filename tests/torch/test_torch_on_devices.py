"""Checks of other files with tensors that take the path of a GPU's (setting host_device)."""
from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bpsfast.torch as bps
from bpsfast.gpu.host import HostDevice, host_device
from bpsfast.torch.backend.device_calls import DeviceCall
from bpsfast.trainer import process
from tests.support.device_memory import LIMIT_S, held
from tests.torch import test_cross_barrier, test_ddp, test_torch_ops, test_torch_optimizer, test_torch_parallel

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module", autouse=True)
def ranks_of_torch_have_the_setting():
    """Set host_device in the environment, where processes of `torch_ranks` read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BPSFAST_HOST_DEVICE", "1")
        yield


@pytest.fixture(params=[pytest.param(((2,), 0), marks=pytest.mark.thorough),
                        pytest.param(((2, 2), 0), marks=pytest.mark.thorough), ((2, 1), 1)],
                ids=["2", "2+2", "2+1+helper"])
def shape(request):
    ranks, helpers = request.param
    return {"ranks": ranks, "helpers": helpers, "transport": "tcp" if len(ranks) > 1 else "auto"}


def went_on_device():
    """Return the names of the device threads of this rank's session."""
    return list(process.current().devices._threads)


CHECKS = {
    "sums": (test_torch_ops.sums, "float32", True), "bfloat16": (test_torch_ops.sums, "bfloat16", False),
    "integers": (test_torch_ops.sums, "int64", True), "handles": (test_torch_ops.handles,),
    "differentiable": (test_torch_ops.gradients,), "expanded": (test_torch_ops.expanded_gradient,),
    "compressed": (test_torch_ops.compressed,), "optimizer": (test_torch_optimizer.lambda_free_train, {}),
    "clip, passes": (test_torch_optimizer.lambda_free_train, {"clip": 0.5, "passes": 3}),
    "autocast": (test_torch_optimizer.lambda_free_train, {"autocast": True}),
    "kept gradients": (test_torch_optimizer.lambda_free_train, {"set_to_none": False}),
    "unused": (test_torch_optimizer.unused,),
    "cross barrier": (test_cross_barrier.train, True, *test_cross_barrier.DEFAULTS.values()),
    "DDP": (test_torch_parallel.trains,), "no_sync": (test_torch_parallel.accumulates,),
    "all dtypes": (test_torch_parallel.of_dtypes,), "compressed DDP": (test_torch_parallel.compressed,),
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_same_comes_out(shared_job, shape, check):
    """The results are those of the same job without the setting, to the bit."""
    function, *arguments = CHECKS[check]
    job = shared_job(**shape, host_device=True)
    found = job.run(function, *arguments)
    n_going = 1 if check == "unused" else job.size  # there only rank 0 has a gradient
    assert job.run(went_on_device)[:n_going] == [["host"]] * n_going
    assert found == shared_job(**shape).run(function, *arguments)


# -- the process group -------------------------------------------------------------------------------------------------


def collectives():
    """Return the result of every collective on this rank, and how many tensors took the device path."""
    rank, size, made, count = dist.get_rank(), dist.get_world_size(), [], [0]
    pair = DeviceCall._pair

    def counted(self, tensor):
        count[0] += 1
        return pair(self, tensor)

    DeviceCall._pair = counted
    try:
        for n in (0, 1, 1000, 70_001):
            x = torch.arange(n, dtype=torch.float32) * (rank + 1) / 3
            whole = torch.arange(n * size, dtype=torch.float32) * (rank + 1) / 7
            total = x.clone()
            dist.all_reduce(total)
            waited = x.clone()
            work = dist.all_reduce(waited, dist.ReduceOp.MAX, async_op=True)
            given = x.clone()
            dist.broadcast(given, 1)
            parts = [torch.zeros_like(x) for _ in range(size)]
            dist.all_gather(parts, x)
            gathered = torch.zeros_like(whole)
            dist.all_gather_into_tensor(gathered, x)
            in_place = torch.zeros_like(whole)
            mine = in_place[rank * n : (rank + 1) * n]
            mine.copy_(x)
            dist.all_gather_into_tensor(in_place, mine)
            scattered = torch.zeros_like(x)
            dist.reduce_scatter_tensor(scattered, whole) if dist.get_backend() != "gloo" else dist.reduce_scatter(
                scattered, list(whole.chunk(size)) if n else [x] * size)
            swapped = torch.zeros_like(whole)
            dist.all_to_all_single(swapped, whole)
            rooted = x.clone()
            dist.reduce(rooted, 0)
            at_root = [torch.zeros_like(x) for _ in range(size)] if rank == 0 else None
            dist.gather(x, at_root, 0)
            dealt = torch.zeros_like(x)
            dist.scatter(dealt, [part.contiguous() for part in parts] if rank == 1 else None, 1)
            work.wait()
            ring = torch.zeros_like(x)
            sends = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, ring, (rank - 1) % size)]
            for each in dist.batch_isend_irecv(sends):
                each.wait()
            made += [total, waited, given, *parts, gathered, in_place, scattered, swapped, dealt, ring, x, whole,
                     *(at_root or [rooted[:0]]), *([rooted] if rank == 0 else [])]
    finally:
        DeviceCall._pair = pair
    return [tensor.numpy() for tensor in made], count[0]


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (4, 2)])
def test_collectives(torch_ranks, size, nodes):
    for (gloo, none), (ours, n_on_device) in torch_ranks(size, nodes).compare(collectives):
        assert none == 0
        assert n_on_device > 50
        for a, b in zip(gloo, ours, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("program", ["plain", "accumulating", "unused", "static"])
def test_torchs_own_ddp(torch_ranks, program):
    test_ddp.assert_same(torch_ranks(2).compare(getattr(test_ddp, program)), exact=True)


def futures():
    """Callbacks of a collective find its result; coalesced ones have a single work."""
    x = torch.full((10,), 1.0 + dist.get_rank())
    chained = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0].sum().item()).wait()
    many = [torch.full((n,), 1.0 + dist.get_rank()) for n in (3, 5, 7)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for each in many:
            dist.all_reduce(each)
    manager.wait()
    return chained, [each.sum().item() for each in many]


def test_futures_and_coalesced_calls(torch_ranks):
    assert torch_ranks(2).grouped(futures) == [(30.0, [9.0, 15.0, 21.0])] * 2


# -- hooks -------------------------------------------------------------------------------------------------------------


def backward_while_the_stream_stands_still():
    """Take a step, then hold up the stream on which gradients count as computed: backward ends all the same."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    named = [(f"held up {name}", parameter) for name, parameter in net.named_parameters()]  # a job has other tests, too
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), named)
    device, means = host_device(), []
    for held_up in False, True:
        x = torch.full((4, 20), 1.0 + bps.rank())
        optimizer.zero_grad(set_to_none=not held_up)
        with held(device) as gate:
            if held_up:
                # torch's current stream, so to speak
                device.location = lambda: HostDevice.location(device, gate.stream)
            net(x).sum().backward()
            own = [p.grad.clone() for p in net.parameters()]
            is_held = held_up and not gate.stream.record().done()
            timer = threading.Timer(0.05, gate.go)
            timer.start()
            optimizer.synchronize()
            timer.join()
            gate.stream.record().wait(LIMIT_S)
            vars(device).pop("location", None)
        with optimizer.skip_synchronize():
            optimizer.step()
        means += [torch.allclose(p.grad, bps.push_pull(grad, name=f"own {held_up} {i}"))
                  for i, (p, grad) in enumerate(zip(net.parameters(), own))]
    return is_held, means


def test_backward_does_not_wait_for_the_stream(shared_job, shape):
    job = shared_job(**shape, host_device=True)
    assert job.run(backward_while_the_stream_stands_still) == [(True, [True] * 8)] * job.size
