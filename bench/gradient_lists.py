"""Gradient lists of three networks: the shapes of all their parameters, in forward order.

Few tensors, most bytes in one of them (VGG-19); 161 tensors, most of them tiny (ResNet-50); 278, hardly a large one
(Inception-BN). The bytes are those of float32.

References
----------
torchvision: vgg19 (143,667,240 parameters), resnet50 (25,557,032). Inception-BN: Ioffe and Szegedy, arXiv:1502.03167,
as MXNet's example ``image-classification/symbols/inception-bn.py`` builds it (11,295,240; convolutions have biases).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from bpsfast.bench import resnet

Shapes = dict[str, tuple[int, ...]]

_VGG19 = (64, 64, 128, 128, *[256] * 4, *[512] * 8)  # channels of its 16 convolutions
_CLASSES = 1000

#: block -> channels of 1x1 (0: none), of the 3x3 and its reduction, of both double 3x3 and theirs, of the projection
_INCEPTION = {
    "3a": (64, 64, 64, 64, 96, 32), "3b": (64, 64, 96, 64, 96, 64), "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128), "4b": (192, 96, 128, 96, 128, 128), "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128), "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128), "5b": (352, 192, 320, 192, 224, 128),
}


def vgg19() -> Shapes:
    """Return name -> shape: 16 convolutions and 3 dense layers with biases."""
    shapes: Shapes = {}
    n_in = 3
    for i, n_out in enumerate(_VGG19, start=1):
        shapes[f"conv{i}.weight"], shapes[f"conv{i}.bias"] = (n_out, n_in, 3, 3), (n_out,)
        n_in = n_out
    for i, (n_in, n_out) in enumerate(((512 * 7 * 7, 4096), (4096, 4096), (4096, _CLASSES)), start=1):
        shapes[f"fc{i}.weight"], shapes[f"fc{i}.bias"] = (n_out, n_in), (n_out,)
    return shapes


def inception_bn() -> Shapes:
    """Return name -> shape: 69 convolutions with biases, each with its normalisation, and the classifier."""
    shapes: Shapes = {}

    def convolution(name: str, n_in: int, n_out: int, kernel: int) -> int:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (n_out, n_in, kernel, kernel), (n_out,)
        shapes[f"{name}.gamma"] = shapes[f"{name}.beta"] = (n_out,)
        return n_out

    n_in = convolution("1", 3, 64, 7)
    n_in = convolution("2", convolution("2_reduce", n_in, 64, 1), 192, 3)
    for block, (one, three_reduced, three, double_reduced, double, projected) in _INCEPTION.items():
        n_out = 0
        if one:
            n_out += convolution(f"{block}_1x1", n_in, one, 1)
        n_out += convolution(f"{block}_3x3", convolution(f"{block}_3x3_reduce", n_in, three_reduced, 1), three, 3)
        reduced = convolution(f"{block}_double_3x3_reduce", n_in, double_reduced, 1)
        reduced = convolution(f"{block}_double_3x3_0", reduced, double, 3)
        n_out += convolution(f"{block}_double_3x3_1", reduced, double, 3)
        # a block that halves the picture passes its input through a pooling instead of a projection
        n_in = n_out + (convolution(f"{block}_proj", n_in, projected, 1) if projected else n_in)
    shapes["fc.weight"], shapes["fc.bias"] = (_CLASSES, n_in), (_CLASSES,)
    return shapes


MODELS: Mapping[str, Callable[[], Shapes]] = {
    "vgg19": vgg19, "resnet50": resnet.gradients, "inception-bn": inception_bn,
}


def n_elements(model: str) -> list[int]:
    """Return the elements of each parameter of *model* (a key of `MODELS`)."""
    return [prod(shape) for shape in MODELS[model]().values()]
