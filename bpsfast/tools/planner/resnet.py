"""ResNet-18 and ResNet-50: most of their tensors are tiny (He et al., arXiv:1512.03385).

11,689,512 parameters in 62 tensors, and 25,557,032 in 161, as torchvision's ``resnet18`` and ``resnet50`` have them.
"""
from __future__ import annotations

from .model_shapes import Shapes

_BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, bottleneck blocks
_BASIC_BLOCKS = ((64, 2), (128, 2), (256, 2), (512, 2))
_EXPANSION = 4


def resnet18() -> Shapes:
    """Return name -> shape: every convolution's weight, every normalisation's weight and bias, the classifier."""
    shapes: Shapes = {}
    _convolution(shapes, "conv1", "bn1", 3, 64, 7)
    n_in = 64
    for layer, (width, n_blocks) in enumerate(_BASIC_BLOCKS, start=1):
        for block in range(n_blocks):
            at = f"layer{layer}.{block}"
            _convolution(shapes, f"{at}.conv1", f"{at}.bn1", n_in, width, 3)
            _convolution(shapes, f"{at}.conv2", f"{at}.bn2", width, width, 3)
            if n_in != width:
                _convolution(shapes, f"{at}.downsample.0", f"{at}.downsample.1", n_in, width, 1)
            n_in = width
    shapes["fc.weight"], shapes["fc.bias"] = (_CLASSES, n_in), (_CLASSES,)
    return shapes


def resnet50() -> Shapes:
    """Return name -> shape, as `resnet18`."""
    shapes: Shapes = {}
    _convolution(shapes, "conv1", "bn1", 3, 64, 7)
    n_in = 64
    for layer, (width, n_blocks) in enumerate(_BLOCKS, start=1):
        for block in range(n_blocks):
            at = f"layer{layer}.{block}"
            _convolution(shapes, f"{at}.conv1", f"{at}.bn1", n_in, width, 1)
            _convolution(shapes, f"{at}.conv2", f"{at}.bn2", width, width, 3)
            _convolution(shapes, f"{at}.conv3", f"{at}.bn3", width, width * _EXPANSION, 1)
            if block == 0:
                _convolution(shapes, f"{at}.downsample.0", f"{at}.downsample.1", n_in, width * _EXPANSION, 1)
            n_in = width * _EXPANSION
    shapes["fc.weight"], shapes["fc.bias"] = (_CLASSES, n_in), (_CLASSES,)
    return shapes


def _convolution(shapes: Shapes, name: str, norm: str, n_in: int, n_out: int, kernel: int) -> None:
    shapes[f"{name}.weight"] = (n_out, n_in, kernel, kernel)
    shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (n_out,)
