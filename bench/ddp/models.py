"""The models that `bench ddp` trains, and the bytes of their gradients."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Model(NamedTuple):
    """`nbytes` of float32 gradients; a batch of a rank has `n_samples`; `views`: DDP's `gradient_as_bucket_view`."""

    nbytes: int
    n_samples: int
    is_wide: bool
    views: bool = False


_WIDE = Model(4 * (3 * (1664 * 1664 + 1664) + 1664 * 10 + 10), 1, is_wide=True)
#: Wide layers with a batch of one sample, with and without `gradient_as_bucket_view`; convolutions with a large batch.
MODELS = {"comm-bound": _WIDE, "comm-bound views": _WIDE._replace(views=True),
          "compute-bound": Model(4 * ((3 * 9 + 1) * 32 + 3 * (32 * 9 + 1) * 32 + 33 * 10), 24, is_wide=False)}


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
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def batch(name: str, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of *rank* in *step*, the same each time."""
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    n = MODELS[name].n_samples
    shape = (n, 1664) if MODELS[name].is_wide else (n, 3, 32, 32)
    return torch.randn(shape, generator=generator), torch.randint(10, (n,), generator=generator)
