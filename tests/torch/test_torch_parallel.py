"""DistributedDataParallel: when backward returns, the gradients are their averages over the ranks."""
from __future__ import annotations

import pytest
import torch

import bpsfast.torch as bps
from bpsfast.torch.compression import Compression, Compressor
from bpsfast.torch.parallel import DistributedDataParallel
from bpsfast.trainer import process
from tests.support.averaged_gradients import assert_close, averages, gradients, loss_of, network
from tests.support.every_shape import SHAPES

pytestmark = pytest.mark.matrix

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def of_dtypes():
    for dtype in FLOATS:
        model = network(dtype=dtype)
        ddp = DistributedDataParallel(model)
        for step in range(3):
            ddp.zero_grad()
            loss_of(ddp, bps.rank(), step, dtype).backward()
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 3e-2)
            assert_close(gradients(model), averages(model, steps=(step,), dtype=dtype), tolerance)
            assert all(p.grad.dtype == dtype for p in model.parameters())


def test_gradients_of_all_dtypes(everywhere):
    everywhere.run(of_dtypes)


def by_differences():
    model = network(seed=1)
    ddp = DistributedDataParallel(model)
    loss_of(ddp, bps.rank()).backward()
    h = 1e-5
    with torch.no_grad():
        for p in model.parameters():
            flat, gradient = p.view(-1), p.grad.view(-1)
            for i in range(len(flat)):
                kept, sides = flat[i].item(), []
                for side in (h, -h):
                    flat[i] = kept + side
                    sides.append(sum(loss_of(model, rank).item() for rank in range(bps.size())) / bps.size())
                flat[i] = kept
                assert gradient[i].item() == pytest.approx((sides[0] - sides[1]) / (2 * h), rel=1e-6, abs=1e-6)


def test_gradients_are_finite_differences(everywhere):
    everywhere.run(by_differences)


class Normed(torch.nn.Module):
    """Buffers of several kinds, one of them not in the state; an integer one is drawn by each rank."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = torch.nn.BatchNorm1d(3)
        self.norm.running_mean.uniform_()
        self.register_buffer("drawn", torch.randint(0, 100, (4,), dtype=torch.int32))
        self.register_buffer("mask", torch.rand(3) < 0.5)
        self.register_buffer("left_out", torch.rand(2, 3).t(), persistent=False)

    def forward(self, x):
        return self.norm(x)


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def starts_alike():
    model = Normed(bps.rank())
    own, first = buffers_of(model), buffers_of(Normed(0))
    ddp = DistributedDataParallel(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, Normed(0).state_dict()[name]), name
    assert torch.equal(model.left_out, own["left_out"])
    ddp(torch.ones(2, 3) * (bps.rank() + 1))
    assert torch.equal(model.left_out, first["left_out"]) and not model.left_out.is_contiguous()
    model.drawn += bps.rank()
    ddp.eval()
    with torch.no_grad():
        ddp(torch.ones(2, 3))
    assert torch.equal(model.drawn, first["drawn"])
    # rank 0's statistics of its batch of ones, as BatchNorm makes them: 0.9 of the old ones and 0.1 of the mean
    assert torch.allclose(model.norm.running_mean, first["norm.running_mean"] * 0.9 + 0.1)
    assert model.norm.num_batches_tracked.item() == 1


def test_all_ranks_have_rank_0s_parameters_and_buffers(everywhere):
    everywhere.run(starts_alike)


def keeps_buffers():
    model = Normed(bps.rank())
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    model.drawn.fill_(bps.rank())
    ddp(torch.ones(2, 3))
    assert model.drawn.tolist() == [bps.rank()] * 4


def test_buffers_that_are_not_broadcast(everywhere):
    everywhere.run(keeps_buffers)


def accumulates():
    model = network(seed=2)
    ddp = DistributedDataParallel(model)
    for first in (0, 10):
        ddp.zero_grad()
        with ddp.no_sync():
            for step in (first, first + 1):
                loss_of(ddp, bps.rank(), step).backward()
            local = gradients(model)
            with ddp.no_sync():
                pass
            loss_of(ddp, bps.rank(), first + 2).backward()
        assert any(not torch.equal(a, b) for a, b in zip(local, gradients(model))), "it still adds up"
        loss_of(ddp, bps.rank(), first + 3).backward()
        assert_close(gradients(model), averages(model, steps=range(first, first + 4)))
    ddp.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, bps.rank()).backward()
    ddp.synchronize()
    wanted = averages(model)
    assert_close(gradients(model), wanted)
    ddp.synchronize()  # that was done
    assert_close(gradients(model), wanted)


def test_no_sync_adds_up(everywhere):
    everywhere.run(accumulates)


def losses_apart():
    """Two forward passes with a backward pass each; and two backward passes through one graph."""
    model = network(seed=3)
    ddp = DistributedDataParallel(model)
    first, second = loss_of(ddp, bps.rank(), 0), loss_of(ddp, bps.rank(), 1)
    first.backward()
    second.backward(retain_graph=True)
    assert_close(gradients(model), averages(model, steps=(0, 1)))
    second.backward()
    assert_close(gradients(model), averages(model, steps=(0, 1, 1)))


def test_several_backward_passes(everywhere):
    everywhere.run(losses_apart)


class Eighth(Compressor):
    """Sends an eighth as half, in another shape."""

    @staticmethod
    def compress(tensor):
        return (tensor.reshape(-1) / 8).half(), tensor

    @staticmethod
    def decompress(tensor, context):
        return tensor.to(context.dtype).mul_(8).reshape(context.shape)


def compressed():
    for compression in (Compression.none, Compression.fp16, Compression.bf16, Eighth, Eighth()):
        model = network(seed=5)
        ddp = DistributedDataParallel(model, compression=compression)
        tolerance = 1e-12 if compression is Compression.none or bps.size() == 1 else 5e-2
        for step in range(3):
            ddp.zero_grad()
            loss_of(ddp, bps.rank(), step).backward()
            assert_close(gradients(model), averages(model, steps=(step,)), tolerance)


def test_compressed_gradients(everywhere):
    everywhere.run(compressed)


def trains():
    """A model under DistributedDataParallel beside one process that sees all batches: the same state."""
    torch.manual_seed(bps.rank())
    model, alone = network(seed=bps.rank()), network(seed=0)
    ddp = DistributedDataParallel(model, device_ids=[bps.local_rank()])
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (ddp, alone)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(ddp, bps.rank(), step).backward()
        for p, mean in zip(alone.parameters(), averages(alone, steps=(step,))):
            p.grad = mean
        for optimizer in optimizers:
            optimizer.step()
    assert_close(model.parameters(), alone.parameters())
    state = ddp.state_dict()
    assert set(state) == {f"module.{name}" for name in model.state_dict()}
    other = DistributedDataParallel(network(seed=9))
    other.load_state_dict(state)
    assert_close(other.parameters(), model.parameters(), 0)


def test_training(everywhere):
    everywhere.run(trains)


def made_again():
    """Repeated wrapping takes no more memory than the modules in use."""
    n_units, kept = [], []
    model = network()
    for _ in range(4):
        ddp = DistributedDataParallel(model)
        model.zero_grad()
        loss_of(ddp, bps.rank()).backward()
        assert_close(gradients(model), averages(model))
        n_units.append(len(process.current().tensors.units()))
        kept = [ddp] if bps.rank() % 2 else []  # as somebody may
        del ddp
    kept.clear()
    assert n_units[3] == n_units[2]
    assert sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()) == 0


def test_a_module_may_be_wrapped_again(everywhere):
    everywhere.run(made_again)


def test_shapes_are_those_of_one_to_four_ranks_on_one_and_two_nodes():
    wanted = {(n,) for n in (1, 2, 3, 4)} | {(1, 1), (2, 1), (2, 2)}
    assert set(SHAPES) == wanted and len(SHAPES) == len(wanted)
