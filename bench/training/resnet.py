"""ResNet with bottleneck blocks (He et al., arXiv:1512.03385; stride in the 3x3 convolution, as torchvision has it)."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

_EXPANSION = 4


class Bottleneck(nn.Module):
    """One block: 1x1, 3x3, 1x1."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = width * _EXPANSION
        self.convolutions = nn.Sequential(
            *_convolution(n_in, width, 1), nn.ReLU(), *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, n_out, 1))
        self.shortcut = nn.Sequential() if n_in == n_out and stride == 1 else nn.Sequential(
            *_convolution(n_in, n_out, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, width * 4, height, width) of (batch, n_in, height, width)."""
        return functional.relu(self.convolutions(x) + self.shortcut(x))


class ResNet(nn.Module):
    """*n_blocks* of each of four stages, the first *width* wide; ResNet-50 is (3, 4, 6, 3), 64."""

    def __init__(self, n_blocks: Sequence[int], width: int, n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        n_in = width
        for stage, n in enumerate(n_blocks):
            for block in range(n):
                layers.append(Bottleneck(n_in, width << stage, 2 if stage and not block else 1))
                n_in = (width << stage) * _EXPANSION
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, n_classes))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of images (batch, 3, height, width) against labels (batch,)."""
        return functional.cross_entropy(self.layers(x), y)


def _convolution(n_in: int, n_out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(n_out)
