"""push_pull of torch's tensors on the GPU: sums, and their place in the order of the caller's stream."""
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import bpsfast  # noqa: E402
import bpsfast.torch as bps  # noqa: E402
from tests.gpu.place import REHEARSES, WHERE, nap, now, tensor  # noqa: E402
from tests.gpu.ranks import start_ranks  # noqa: E402

DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"]
SIZES = [0, 1, 1000, 1_024_000, 5_000_001]  # nothing; a part; one partition; several, the last one not whole


def sums(dtype, average):
    x = tensor(torch.arange(12).reshape(3, 4) * (bps.rank() + 1), dtype)
    kept = x.clone()
    new = bps.push_pull(x, average, f"{dtype} {average}")
    assert new.device == x.device and new.data_ptr() != x.data_ptr() and torch.equal(x, kept)
    assert bps.push_pull_inplace(x, average, f"{dtype} {average}") is x and torch.equal(x, new)
    want = torch.arange(12).reshape(3, 4) * 3
    return torch.equal(new.cpu(), (want.float() / 2 if average else want).to(new.dtype) if new.is_floating_point()
                       else (want // 2 if average else want).to(new.dtype))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(gpu_job, dtype, average):
    assert gpu_job.run(sums, dtype, average) == [True, True]


def sized(n):
    for round in range(4):
        x = torch.arange(n, device=WHERE, dtype=torch.float32) % 1000 + bps.rank() + round
        total = bps.push_pull(x, False, f"sized {n}")
        want = (torch.arange(n) % 1000).float() * 2 + 1 + 2 * round
        assert torch.equal(total.cpu(), want), round
    return True


@pytest.mark.parametrize("n", SIZES)
def test_sizes(gpu_job, n):
    assert gpu_job.run(sized, n) == [True, True]


def many():
    xs = [torch.full((1000 * i + 1,), float(i + bps.rank()), device=WHERE) for i in range(20)]
    handles = [bps.push_pull_async_inplace(x, average=False, name=f"many {i}") for i, x in enumerate(xs)]
    for handle in reversed(handles):
        bps.synchronize(handle)
    return all(bps.poll(handle) for handle in handles) and all(
        bool((x == 2 * i + 1).all()) for i, x in enumerate(xs))


def test_many_at_once(gpu_job):
    assert gpu_job.run(many) == [True, True]


def through_bpsfast():
    x = torch.full((70_000,), float(bps.rank() + 1), device=WHERE)
    fresh = bpsfast.push_pull(x, average=False, name="through bpsfast")
    out = torch.empty_like(x)
    assert bpsfast.push_pull(x, average=False, name="through bpsfast", out=out) is out
    is_alike = REHEARSES or (type(fresh) is torch.Tensor and fresh.device == x.device and torch.equal(fresh, out))
    return is_alike, out.sum().item()


def test_bpsfasts_own_push_pull_takes_torchs_tensors(gpu_job):
    assert gpu_job.run(through_bpsfast) == [(True, 210_000.0)] * 2


def differentiable():
    x = torch.full((4,), 2.0, device=WHERE, requires_grad=True)
    y = bps.push_pull(x * x, average=False, name="differentiable")
    (y * (bps.rank() + 1)).sum().backward()
    return y.tolist(), x.grad.tolist()


def test_its_gradient(gpu_job):
    assert gpu_job.run(differentiable) == [([8.0] * 4, [12.0] * 4)] * 2


def after_a_long_kernel():
    x = torch.zeros(3_000_000, device="cuda")
    bps.push_pull_inplace(x, average=False, name="after a nap")  # the first one makes and pins memory
    torch.cuda.synchronize()
    for round in range(3):
        nap()
        x.fill_(bps.rank() + 1 + round)
        handle = bps.push_pull_async_inplace(x, average=False, name="after a nap")
        assert not now().query(), "the call has waited for the stream"
        bps.synchronize(handle)
        doubled = x * 2  # enqueued without any wait of the host's
        assert bool((doubled == 2 * (3 + 2 * round)).all()), round
    return True


@pytest.mark.cuda
def test_it_takes_what_kernels_before_it_have_written(gpu_job):
    assert gpu_job.run(after_a_long_kernel) == [True, True]


def on_a_stream():
    stream = torch.cuda.Stream()
    x = torch.zeros(3_000_000, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for round in range(3):
            nap(0.1)
            x.fill_(bps.rank() + round)
            total = bps.push_pull(x, average=False, name="on a stream")
            x.zero_()  # the input is the caller's again
            assert bool((total == 1 + 2 * round).all()), round
    return torch.cuda.current_stream() != stream


@pytest.mark.cuda
def test_a_stream_of_the_users(gpu_job):
    assert gpu_job.run(on_a_stream) == [True, True]


def alone_beside_a_busy_stream():
    busy = torch.cuda.Stream()
    x = torch.full((1_000_000,), 1.0, device="cuda")
    bps.push_pull(x, average=False, name="alone")
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        nap(2.0)
        end = now()
    total = bps.push_pull(x, average=False, name="alone")
    torch.cuda.current_stream().synchronize()
    return not end.query() and bool((total == 1).all())


@pytest.mark.cuda
def test_other_streams_are_not_waited_for():
    job = start_ranks(1)  # kernels of two ranks that share a GPU take turns
    try:
        assert job.run(alone_beside_a_busy_stream) == [True]
    finally:
        job.close()


def released_at_once():
    """Tensors that nobody holds any more while they are copied: their memory is not another's too early."""
    for round in range(20):
        handle = bps.push_pull_async(torch.full((2_000_000,), float(round), device=WHERE), False, "released")
        junk = torch.full((2_000_000,), -1.0, device=WHERE)
        total = bps.synchronize(handle)
        if not bool((total == 2 * round).all()):
            return round
        del handle, junk, total
    return True


def test_tensors_that_are_released_at_once(gpu_job):
    assert gpu_job.run(released_at_once) == [True, True]


def across_nodes():
    for round in range(3):
        x = torch.arange(3_000_000, device=WHERE, dtype=torch.float32) + bps.rank() + round
        bps.push_pull_inplace(x, average=False, name="across nodes")
        want = torch.arange(3_000_000, dtype=torch.float32)
        want = (want + round) + (want + 1 + round) + (want + 2 + round) if bps.size() == 3 else None
        if not torch.equal(x.cpu(), want):
            return round
    return True


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_several_nodes(transport):
    job = start_ranks(2, 1, transport=transport)
    try:
        assert job.run(across_nodes) == [True] * 3
    finally:
        job.close()
