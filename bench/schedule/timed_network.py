"""A network whose layers take a set time: it has real parameters, gradients and hooks, but sleeps instead of computing.

Two cores cannot compute for four machines and move bytes at the same time. A layer here uses each of its weights once,
cheaply, so that its gradient depends on the weight and on the rank's data. It sleeps for the rest of its time, like a
host whose accelerator works.
"""
from __future__ import annotations

import time
from typing import Any

import torch

from bpsfast.tools.simulator.workload import Layer, Workload

_SCALE = 1e-3
_SEED = 20


class TimedLayer(torch.nn.Module):
    """One layer of a workload; its gradients are ready when its backward time is over."""

    def __init__(self, layer: Layer, job: Workload, generator: torch.Generator) -> None:
        super().__init__()
        self._times_s = layer.forward_s, layer.backward_s
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(_SCALE * torch.randn(job.shapes[name], generator=generator)) for name in layer.tensors)
        self.sleeps = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the vector *x*, slightly scaled."""
        for weight in self.weights:
            x = x * (1 + _SCALE * (weight * weight).sum())
        return _Sleep.apply(x, *self._times_s) if self.sleeps else x


class _Sleep(torch.autograd.Function):
    """Returns its input after a time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


def network(job: Workload) -> torch.nn.Sequential:
    """Return the network of *job*, with the same weights in every process."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.nn.Sequential(*(TimedLayer(layer, job, generator) for layer in job.layers))


def data(rank: int, step: int) -> torch.Tensor:
    """Return the input of *rank* in *step*."""
    return torch.sin(torch.arange(8, dtype=torch.float32) + 1 + rank + 0.1 * step)
