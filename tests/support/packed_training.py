"""Training with torch's DDP and compressing hooks: models, states, steps, for ranks of tests' jobs."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import bpsfast.torch as bps
import bpsfast.torch.backend  # noqa: F401
from bpsfast.torch.hooks import CompressionState, randomk_hook
from tests.support.torch_ranks import keep_gloo

SHAPE = {"ranks": (2, 1), "transport": "tcp", "min_compress_bytes": 1024, "partition_bytes": 100_000}


class Net(torch.nn.Module):
    """A model whose layers are listed in a different order than they are used, so torch rebuilds its buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = torch.nn.Linear(200, 150)
        self.middle = torch.nn.Linear(400, 200)
        self.first = torch.nn.Linear(50, 400)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Deep(torch.nn.Module):
    """A model with layers in order: packs of the first bucket, which has all layers, span the later buckets.

    With a number, the gradient of that layer's input fails after the gradients of later layers have been sent.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(50 if i == 0 else 150, 150) for i in range(6))

    def forward(self, x, fail_at=None):
        for number, layer in enumerate(self.layers):
            if number == fail_at:
                x.register_hook(_refuse)
            x = torch.tanh(layer(x))
        return x


def _refuse(gradient):
    raise RuntimeError("in the midst of backward")


def group(path):
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=bps.rank(), world_size=bps.size())
        keep_gloo()


def made(name, path, hook=randomk_hook, net=Net, wrap=lambda hook: hook, rate=0.1, **options):
    group(path)
    model = DistributedDataParallel(net(), bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    state = CompressionState(k=0.05, name=name, **options)
    state.follow(optimizer)
    model.register_comm_hook(state, wrap(hook))
    return model, optimizer, state


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(100 * step + bps.rank())
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step) if step != 4 else 0.0  # 0 cannot scale the residual
        optimizer.zero_grad()
        model(torch.randn(8, 50)).square().mean().backward()
        optimizer.step()


def again(model, state):
    """Wrap the same module again, because torch's wrapper cannot be used after a failed backward pass."""
    model = DistributedDataParallel(model.module, bucket_cap_mb=0.3)
    model.register_comm_hook(state, randomk_hook)
    return model


def weights(model):
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())
