"""For `bench device`: trains a model whose gradients are averaged on the device and by the CPU; compares the bits.

Gradients are computed once and averaged twice: on the device by `DistributedOptimizer`, and from copies in shared
memory, as on a machine without a GPU. Two models train, one with each average, by the same optimizer on the same
device; so their parameters are the same at the end if all averages were.
"""
from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import bpsfast

if TYPE_CHECKING:
    import torch

_N_SAMPLES = 16  # of a rank, in a step
_N_TESTED = 360


class Trained(NamedTuple):
    """The result of one rank. `losses` of its own samples; `differing`: the first gradients whose averages differed."""

    n_steps: int
    n_averages: int
    n_differing: int
    differing: list[str]
    n_parameters: int
    n_differing_parameters: int
    ranks_agree: bool
    accuracy: float
    losses: list[float]
    took_s: float


def train(device: str, n_steps: int) -> Trained:
    """Train *n_steps* steps on torch's *device* ("cuda", "cpu": of a job with host_device)."""
    import torch

    from bpsfast import torch as bps

    rank, size = bps.rank(), bps.size()
    torch.manual_seed(rank)  # rank 0's weights are broadcast
    models = [network().to(device) for _ in range(2)]
    bps.broadcast_parameters(models[0].state_dict(), root_rank=0)
    models[1].load_state_dict(models[0].state_dict())
    local: dict[str, torch.Tensor] = {}
    for name, parameter in models[0].named_parameters():
        parameter.register_post_accumulate_grad_hook(_keeper(local, name))  # before the optimizer's hooks
    plain = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    named = [(f"digits.{name}", parameter) for name, parameter in models[0].named_parameters()]
    optimizer: Any = bps.DistributedOptimizer(plain[0], named_parameters=named)
    shared = {name: bpsfast.empty(tuple(p.shape), np.float32) for name, p in models[0].named_parameters()}
    images, labels = _digits()
    draw = np.random.default_rng(11)
    losses, differing, n_averages = [], [], 0
    began = time.perf_counter()
    for step in range(n_steps):
        chosen = draw.choice(len(labels) - _N_TESTED, (size, _N_SAMPLES), replace=False)[rank]
        optimizer.zero_grad()
        x, y = torch.from_numpy(images[chosen]).to(device), torch.from_numpy(labels[chosen]).to(device)
        loss = torch.nn.functional.cross_entropy(models[0](x), y)
        loss.backward()
        optimizer.synchronize()
        for (name, ours), (_, theirs) in zip(models[0].named_parameters(), models[1].named_parameters()):
            shared[name][...] = local[name].cpu().numpy()
            average = bpsfast.push_pull(shared[name], name=f"by the CPU {name}")
            assert ours.grad is not None, "it was averaged"
            n_averages += 1
            if not _same(ours.grad, average):
                differing.append(f"{name} in step {step}")
            theirs.grad = torch.from_numpy(np.array(average)).to(device)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain[1].step()
        losses.append(loss.item())
    took_s = time.perf_counter() - began
    parameters = [[p.detach().cpu().numpy() for p in model.parameters()] for model in models]
    unlike = [not np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(*parameters)]
    digests = bps.broadcast_object([a.tobytes() for a in parameters[0]], 0)
    agree = digests == [a.tobytes() for a in parameters[0]]
    return Trained(n_steps, n_averages, len(differing), differing[:8], sum(a.size for a in parameters[0]), sum(unlike),
                   agree, _accuracy(models[0], images[-_N_TESTED:], labels[-_N_TESTED:], device), losses, took_s)


def network() -> torch.nn.Sequential:
    """Return the network of examples/digits: 1.1 million parameters, most of them in the first linear layer."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 1024), nn.ReLU(),
        nn.Linear(1024, 10),
    )


def _keeper(local: dict[str, torch.Tensor], name: str) -> Any:
    def keep(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "it was accumulated"
        local[name] = parameter.grad.detach().clone()

    return keep


def _same(tensor: torch.Tensor, array: np.ndarray[Any, Any]) -> bool:
    found = tensor.detach().cpu().numpy()
    return np.array_equal(found.view(np.uint32), np.ascontiguousarray(array).view(np.uint32))


def _digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the images that ship with scikit-learn, (n, 1, 8, 8) from 0 to 1, and their labels, in a fixed order."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    order = np.random.default_rng(7).permutation(len(raw.target))
    return (raw.images / 16.0).astype(np.float32)[order, None], raw.target.astype(np.int64)[order]


def _accuracy(model: torch.nn.Module, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], device: str) -> float:
    import torch

    with torch.no_grad():
        guesses = model(torch.from_numpy(images).to(device)).argmax(dim=1).cpu().numpy()
    return float((guesses == labels).mean())
