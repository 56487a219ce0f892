"""Inception-BN: 278 tensors, hardly a large one (Ioffe and Szegedy, arXiv:1502.03167).

11,295,240 parameters, as MXNet's example ``image-classification/symbols/inception-bn.py`` builds it: convolutions have
biases beside their normalisation.
"""
from __future__ import annotations

from .model_shapes import Shapes


#: block -> channels of 1x1 (0: none), of the 3x3 and its reduction, of both double 3x3 and theirs, of the projection
_INCEPTION = {
    "3a": (64, 64, 64, 64, 96, 32), "3b": (64, 64, 96, 64, 96, 64), "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128), "4b": (192, 96, 128, 96, 128, 128), "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128), "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128), "5b": (352, 192, 320, 192, 224, 128),
}


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
