"""A GPU's memory that cards read and write: exported; and, where a card is below its switch, sums that go that way."""
from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import bpsfast  # noqa: E402
import bpsfast.torch as bps  # noqa: E402
from bpsfast.hardware.topology.copies import direct_pairs  # noqa: E402
from bpsfast.hardware.topology.discovery import discover  # noqa: E402
from bpsfast.orchestration.errors import UnsupportedError  # noqa: E402
from tests.support.jobs import Job  # noqa: E402

pytestmark = pytest.mark.cuda


def test_memory_is_exported_as_a_dma_buf():
    from bpsfast.gpu.cuda import cuda_device

    device = cuda_device(0)
    try:
        memory = device.share((4 << 20) + 1)
    except UnsupportedError as exc:
        pytest.skip(str(exc))
    stream = device.stream()
    stream.move(memory.address, memory.address + (2 << 20), 1 << 20)
    device.flush_remote_writes()
    stream.record().wait()
    assert "dmabuf" in os.readlink(f"/proc/self/fd/{memory.fd}") and memory.gpu == device.address
    assert memory.nbytes >= 4 << 20 and memory.address % 4096 == memory.nbytes % 4096 == 0
    memory.close()
    stream.close()


def sums():
    rank, size, found = bpsfast.rank(), bpsfast.size(), []
    for step in range(5):
        for n in (3_000_001, 70_001):
            x = torch.arange(n, device="cuda") % 97 * (rank + 1) + step
            found.append(bps.push_pull(x.float(), average=False, name=f"direct {n}").cpu().numpy())
            expected = sum(np.arange(n) % 97 * (other + 1) + step for other in range(size))
            assert (found[-1] == expected).all(), (step, n)
    return bpsfast.counters()


def test_sums_go_straight_over_a_card_below_the_gpus_switch():
    """Two machines of one rank each, on this one, over the card's own loopback."""
    topology = discover(None)
    pairs = [pair for pair in direct_pairs(topology) if pair.gpu == "gpu0"]
    devices = [name for pair in pairs for name in topology.part(pair.card).device.split(",")
               if os.path.exists(f"/sys/class/infiniband/{name}")]
    if not devices:
        pytest.skip("no RDMA card is below the PCIe switch of the first GPU")
    job = Job(ranks=(1, 1), transport="rdma", allow_shm=False, gpu_direct=True, rdma_devices=f"={devices[0]}")
    try:
        outcomes = job.attempt(sums)
        if any("ibv_reg_dmabuf_mr" in outcome.text or "dma-buf" in outcome.text for outcome in outcomes):
            pytest.skip(outcomes[0].text)
        for outcome in outcomes:
            assert not outcome.error, outcome
            assert outcome.value["direct_partitions"] > 0
        job.close()
    finally:
        job.kill()
