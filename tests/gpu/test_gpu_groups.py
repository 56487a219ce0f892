"""torch.distributed's calls on the GPU by the backend "bpsfast", and DistributedDataParallel of torch's own."""
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tests.gpu.place import REHEARSES, WHERE, nap, tensor  # noqa: E402
from tests.gpu.ranks import start_ranks  # noqa: E402
from tests.support.every_shape import SturdyJob  # noqa: E402

BACKENDS = ["bpsfast", "cpu:gloo,cuda:bpsfast"]


@pytest.fixture(scope="module", params=BACKENDS)
def group(request):
    """Two ranks in a process group of that name."""
    job = SturdyJob(lambda: _begun(request.param), (2,))
    yield job
    job.run(leave)
    job.close()


def _begun(backend):
    job = start_ranks()
    job.run(enter, backend)
    return job


def enter(backend):
    import bpsfast.torch.backend  # noqa: F401

    dist.init_process_group(backend)


def leave():
    dist.destroy_process_group()


def collectives():
    rank = dist.get_rank()
    found = {}
    x = torch.full((1000,), rank + 1.0, device=WHERE)
    dist.all_reduce(x)
    found["all_reduce"] = x
    x = tensor([rank + 1, 5 - rank], "int64")
    dist.all_reduce(x, dist.ReduceOp.MAX)
    found["max"] = x
    x = torch.full((3,), float(rank), device=WHERE)
    dist.broadcast(x, 1)
    found["broadcast"] = x
    parts = [torch.empty(3, device=WHERE) for _ in range(2)]
    dist.all_gather(parts, torch.full((3,), float(rank), device=WHERE))
    found["all_gather"] = torch.cat(parts)
    whole = torch.empty(6, device=WHERE)
    dist.all_gather_into_tensor(whole, torch.full((3,), float(rank), device=WHERE))
    found["all_gather_into_tensor"] = whole
    out = torch.empty(3, device=WHERE)
    dist.reduce_scatter_tensor(out, torch.arange(6, device=WHERE).float() + rank)
    found["reduce_scatter"] = out - 6 * rank
    out = torch.empty(4, device=WHERE)
    dist.all_to_all_single(out, torch.arange(4, device=WHERE).float() + 10 * rank)
    found["all_to_all"] = out - 2 * rank
    dist.barrier()
    return {name: value.cpu().tolist() for name, value in found.items()}


def test_collectives(group):
    for found in group.run(collectives):
        assert found["all_reduce"] == [3.0] * 1000 and found["max"] == [2, 5] and found["broadcast"] == [1.0] * 3
        assert found["all_gather"] == found["all_gather_into_tensor"] == [0.0] * 3 + [1.0] * 3
        assert found["reduce_scatter"] == [1.0, 3.0, 5.0] and found["all_to_all"] == [0.0, 1.0, 10.0, 11.0]


def messages():
    rank = dist.get_rank()
    x = torch.full((500_000,), float(rank), device=WHERE)
    if rank == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        got = torch.empty_like(x)
        dist.recv(got, 0)
        dist.send(got + 7, 0)
        x = got
    works = [dist.isend(torch.full((9,), float(rank), device=WHERE), 1 - rank, tag=3)]
    out = torch.empty(9, device=WHERE)
    works.append(dist.irecv(out, 1 - rank, tag=3))
    for work in works:
        work.wait()
    return x[0].item(), x[-1].item(), out.tolist()


def test_messages(group):
    assert group.run(messages) == [(7.0, 7.0, [1.0] * 9), (0.0, 0.0, [0.0] * 9)]


def of_the_cpu():
    x = torch.full((10,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x.tolist()


def test_tensors_of_the_cpu_go_by_the_same_group(group):
    assert group.run(of_the_cpu) == [[3.0] * 10] * 2


def after_a_nap():
    x = torch.zeros(2_000_000, device=WHERE)
    for round in range(3):
        nap(0.1)
        x.fill_(dist.get_rank() + 1 + round)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        if not bool((x * 2 == 2 * (3 + 2 * round)).all()):
            return round
    return True


def test_calls_keep_the_order_of_the_stream(group):
    assert group.run(after_a_nap) == [True, True]


def trained():
    torch.manual_seed(dist.get_rank())  # DDP must make them equal
    model = torch.nn.Sequential(torch.nn.Linear(64, 1200), torch.nn.ReLU(), torch.nn.Linear(1200, 10)).to(WHERE)
    model = DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x, y = torch.randn(16, 64, generator=generator), torch.arange(16) % 10
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x.to(WHERE)), y.to(WHERE))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [p.detach().cpu().numpy().tobytes() for p in model.parameters()], losses


def test_torchs_distributed_data_parallel(group):
    (first, losses), (second, _) = group.run(trained)
    assert first == second and all(loss == loss for loss in losses)


def refused():
    said = []
    for call in (lambda: dist.all_reduce(torch.zeros(4, 6, device=WHERE).t()),
                 lambda: dist.all_reduce(torch.zeros(4, device=WHERE).to_sparse())):
        try:
            call()
        except Exception as exc:  # what torch makes of it
            said.append(f"{type(exc).__name__}: {exc}")
        else:
            said.append("taken")
    return said


def test_what_is_not_contiguous_is_refused(group):
    for transposed, _ in group.run(refused):
        assert "contiguous" in transposed or REHEARSES, transposed
