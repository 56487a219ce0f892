"""VGG without normalisation (Simonyan and Zisserman, arXiv:1409.1556)."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

#: Channels of the convolutions, in stages that end with a maximum over 2x2 pixels.
VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Vgg(nn.Module):
    """Convolutions in *stages*, then dense layers of *inner* on what *pixels* on a side leave."""

    def __init__(self, stages: Sequence[Sequence[int]], inner: int, pixels: int, n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        n_in = 3
        for stage in stages:
            for n_out in stage:
                layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU()]
                n_in = n_out
            layers.append(nn.MaxPool2d(2))
        side = pixels >> len(stages)
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(n_in * side * side, inner), nn.ReLU(), nn.Dropout(),
            nn.Linear(inner, inner), nn.ReLU(), nn.Dropout(), nn.Linear(inner, n_classes))
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):  # else nothing comes out of thirteen layers
                nn.init.kaiming_uniform_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of images (batch, 3, pixels, pixels) against labels (batch,)."""
        return functional.cross_entropy(self.layers(x), y)
