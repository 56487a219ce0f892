"""The models that `bench ddp` trains, and the bytes of their gradients."""
from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from bpsfast.tools.planner import model_shapes

if TYPE_CHECKING:
    import torch


class Model(NamedTuple):
    """`nbytes` of float32 gradients; a batch of a rank has `n_samples`; `views`: DDP's `gradient_as_bucket_view`."""

    nbytes: int
    n_samples: int
    is_wide: bool
    views: bool = False


_WIDE = Model(4 * (3 * (1664 * 1664 + 1664) + 1664 * 10 + 10), 1, is_wide=True)
_RESNET_18 = list(model_shapes.resnet18().values())
#: Wide layers with a batch of one sample, with and without `gradient_as_bucket_view`; convolutions with a large batch;
#: the tensors of ResNet-18, of which only the gradients are made.
MODELS = {"comm-bound": _WIDE, "comm-bound views": _WIDE._replace(views=True),
          "compute-bound": Model(4 * ((3 * 9 + 1) * 32 + 3 * (32 * 9 + 1) * 32 + 33 * 10), 24, is_wide=False),
          "gradients of ResNet-18": Model(4 * sum(map(prod, _RESNET_18)), 1, is_wide=False)}


def network(name: str) -> torch.nn.Module:
    """Return the model *name*, with the same random weights each time."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if MODELS[name].is_wide:
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(1664, 1664), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(1664, 10))
    if name == "gradients of ResNet-18":
        return _tensors()
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _tensors() -> torch.nn.Module:
    """Return a model whose gradients are those of ResNet-18 in number and size, and cost little."""
    import torch
    from torch import nn

    class Tensors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tensors = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in _RESNET_18)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(1, -1)[:, :10] * sum(tensor.view(-1)[0] for tensor in self.tensors)

    return Tensors()


def batch(name: str, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of *rank* in *step*, the same each time."""
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    n = MODELS[name].n_samples
    shape = (n, 1664) if MODELS[name].is_wide else (n, 3, 32, 32)
    return torch.randn(shape, generator=generator), torch.randint(10, (n,), generator=generator)
