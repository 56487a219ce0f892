"""ResNet-50: 161 tensors, most of them tiny (He et al., arXiv:1512.03385).

25,557,032 parameters, as torchvision's ``resnet50`` has them.
"""
from __future__ import annotations

from .model import Shapes

_BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, bottleneck blocks
_EXPANSION = 4
_CLASSES = 1000


def resnet50() -> Shapes:
    """Return name -> shape: every convolution's weight, every normalisation's weight and bias, the classifier."""
    shapes: Shapes = {}

    def convolution(name: str, norm: str, n_in: int, n_out: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (n_out, n_in, kernel, kernel)
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (n_out,)

    convolution("conv1", "bn1", 3, 64, 7)
    n_in = 64
    for layer, (width, n_blocks) in enumerate(_BLOCKS, start=1):
        for block in range(n_blocks):
            at = f"layer{layer}.{block}"
            convolution(f"{at}.conv1", f"{at}.bn1", n_in, width, 1)
            convolution(f"{at}.conv2", f"{at}.bn2", width, width, 3)
            convolution(f"{at}.conv3", f"{at}.bn3", width, width * _EXPANSION, 1)
            if block == 0:
                convolution(f"{at}.downsample.0", f"{at}.downsample.1", n_in, width * _EXPANSION, 1)
            n_in = width * _EXPANSION
    shapes["fc.weight"], shapes["fc.bias"] = (_CLASSES, n_in), (_CLASSES,)
    return shapes
