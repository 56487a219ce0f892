"""torch.compile over the backend "bpsfast": traced calls give right results, others only break the graph."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.matrix

N_STEPS = 4
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def reduced(x):
    y = x.clone()
    dist.all_reduce(y)
    flat = torch.empty(dist.get_world_size() * x.numel())
    dist.all_gather_into_tensor(flat, y * 2)
    part = torch.empty(x.numel() // dist.get_world_size())
    dist.reduce_scatter_tensor(part, x)
    return y, flat, part


def asynchronous(x):
    work = dist.all_reduce(x, async_op=True)
    y = x.new_ones(2) * 3
    work.wait()
    return x * 2, y, work.is_completed()


def barrier_and_broadcast(x):
    dist.barrier()
    y = x * 2
    dist.broadcast(y, 1)
    return y + 1


def gathered(x):
    outs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, x + 1)
    mine = torch.empty_like(x)
    dist.scatter(mine, [x, x * 3] if dist.get_rank() == 0 else None)
    dist.reduce(mine, 1)
    return torch.stack(outs).sum(0), mine if dist.get_rank() == 1 else 0


def sent(x):
    y = torch.empty_like(x)
    if dist.get_rank() == 0:
        dist.send(x * 2, 1)
        dist.recv(y, 1)
    else:
        dist.recv(y, 0)
        dist.send(x * 3, 0)
    return y + 1


def batched(x):
    y, peer = torch.empty_like(x), 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x * 2, peer), dist.P2POp(dist.irecv, y, peer)]):
        work.wait()
    return y + 1


def asked(x):
    group = dist.group.WORLD
    return x + dist.get_rank() + 10 * dist.get_world_size(), dist.get_backend() is not None, group.size() + group.rank()


def by_methods(x):
    group = dist.group.WORLD
    group.allreduce(x).wait()
    group.broadcast([x]).wait()
    return x * 2


def objects(x):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, dist.get_rank())
    return x * sum(found)


FUNCTIONS = {each.__name__: each for each in (
    reduced, asynchronous, barrier_and_broadcast, gathered, sent, batched, asked, by_methods, objects)}


def compiled_and_not(name, **options):
    """Return the results of a function, plain and compiled, twice; for a failure, its class."""
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    graph = torch.compile(function, backend="aot_eager", **options)
    x = torch.arange(4.0) + dist.get_rank()
    found = []
    for each in (function, graph, graph):
        try:
            found.append(plain(each(x.clone())))
        except Exception as exc:
            found.append(f"{type(exc).__name__}: {exc}")
    return found


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_in_a_compiled_function(torch_ranks, name):
    for gloo, ours in torch_ranks(2).compare(compiled_and_not, name, timeout_s=200.0):
        eager, graph, again = ours
        assert (eager == gloo[0] and eager == graph == again) or all(
            isinstance(each, str) for each in gloo[1:]), f"{ours}\n{gloo}"  # torch refuses some to every backend


def of_one_graph():
    """Return whether `reduced`, which torch rewrites, is one graph."""
    return compiled_and_not("reduced", fullgraph=True)


@pytest.mark.timeout(300)
def test_what_torch_rewrites_is_one_graph(torch_ranks):
    for gloo, (eager, graph, _) in torch_ranks(2).compare(of_one_graph, timeout_s=200.0):
        assert eager == graph or (TORCH < (2, 10) and isinstance(gloo[1], str)), f"{graph}\n{gloo}"


def network():
    torch.manual_seed(8)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def trained(how):
    """Train a model that is a compiled DDP, a DDP of a compiled one, or neither; return its parameters."""
    torch._dynamo.reset()
    model = network()
    called = model if how != "inside" else torch.compile(model, backend="aot_eager")
    called = torch.nn.parallel.DistributedDataParallel(called, static_graph=how == "static")
    if how in ("outside", "static"):
        called = torch.compile(called, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
        called(x).square().mean().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


def trained_alone():
    """As `trained`, in one process with all batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(9 * step + rank))
            (model(x).square().mean() / 2).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["neither", "inside", "outside", "static"])
def test_a_compiled_ddp_trains_as_one_process(torch_ranks, how):
    for found in torch_ranks(2).grouped(trained, how, timeout_s=200.0):
        for a, b in zip(found, trained_alone(), strict=True):
            torch.testing.assert_close(torch.tensor(a), b.detach(), rtol=1e-4, atol=1e-6)
