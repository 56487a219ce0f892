"""VGG-16 and VGG-19: few tensors, most bytes in one of them (Simonyan and Zisserman, arXiv:1409.1556).

138,357,544 and 143,667,240 parameters, as torchvision's ``vgg16`` and ``vgg19`` have them (no normalisation).
"""
from __future__ import annotations

#: Name -> shape of every parameter, in forward order.
Shapes = dict[str, tuple[int, ...]]

#: Channels of the convolutions.
_VGG16 = (64, 64, 128, 128, *[256] * 3, *[512] * 6)
_VGG19 = (64, 64, 128, 128, *[256] * 4, *[512] * 8)
_CLASSES = 1000


def vgg16() -> Shapes:
    """Return name -> shape: 13 convolutions and 3 dense layers with biases."""
    return _vgg(_VGG16)


def vgg19() -> Shapes:
    """Return name -> shape: 16 convolutions and 3 dense layers with biases."""
    return _vgg(_VGG19)


def _vgg(channels: tuple[int, ...]) -> Shapes:
    shapes: Shapes = {}
    n_in = 3
    for i, n_out in enumerate(channels, start=1):
        shapes[f"conv{i}.weight"], shapes[f"conv{i}.bias"] = (n_out, n_in, 3, 3), (n_out,)
        n_in = n_out
    for i, (n_in, n_out) in enumerate(((512 * 7 * 7, 4096), (4096, 4096), (4096, _CLASSES)), start=1):
        shapes[f"fc{i}.weight"], shapes[f"fc{i}.bias"] = (n_out, n_in), (n_out,)
    return shapes
