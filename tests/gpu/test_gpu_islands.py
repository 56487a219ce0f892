"""Two ranks that share the GPU sum on it (CUDA IPC, our kernel): the engine's bits, in the streams' order."""
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import bpsfast.torch as bps  # noqa: E402
from bpsfast.gpu.communicator import DTYPES  # noqa: E402
from bpsfast.gpu.shared_device import SharedCommunicator  # noqa: E402
from bpsfast.trainer import process  # noqa: E402
from tests.gpu.place import WHERE, nap  # noqa: E402
from tests.gpu.ranks import start_ranks  # noqa: E402
from tests.support.every_shape import SturdyJob  # noqa: E402


@pytest.fixture(scope="module")
def island_job():
    """Two ranks, with islands."""
    job = SturdyJob(lambda: start_ranks(islands="auto"), (2,))
    yield job
    job.close()


def any_bits(dtype, n):
    """The sum on the GPU, and that of the same bits in memory, which the engine makes."""
    generator = torch.Generator().manual_seed(bps.rank())
    itemsize = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    x = torch.randint(0, 256, (n * itemsize,), dtype=torch.uint8, generator=generator).view(getattr(torch, dtype))
    near = bps.push_pull(x.to(WHERE), False, f"near {dtype} {n}").cpu().view(torch.uint8)
    kept = bps.push_pull(x.clone(), False, f"far {dtype} {n}") if WHERE != "cpu" else None
    islands = process.current().devices._islands._islands.values()
    return (kept is None or torch.equal(near, kept.view(torch.uint8)),
            [type(island.calls) is SharedCommunicator for island in islands])


@pytest.mark.parametrize("n", [1001, 5_000_001])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_bits_are_those_of_the_engine(island_job, dtype, n):
    assert island_job.run(any_bits, dtype, n) == [(True, [True])] * 2


def in_order(n):
    """Sums of what a long kernel writes before, many at once, each input overwritten as soon as it may be."""
    xs = [torch.zeros(300_000 * (i % 4 + 1), device=WHERE) for i in range(n)]
    for round in range(4):
        nap(0.05)
        for i, x in enumerate(xs):
            x.fill_(bps.rank() + i + round)
        handles = [bps.push_pull_async_inplace(x, average=False, name=f"in order {i}") for i, x in enumerate(xs)]
        for i, handle in reversed(list(enumerate(handles))):
            bps.synchronize(handle)
            if not bool((xs[i] == 2 * (i + round) + 1).all()):
                return round, i
    return True


def test_they_keep_the_order_of_streams(island_job):
    assert island_job.run(in_order, 12) == [True, True]
