"""U-GAT-IT, image to image (Kim et al., arXiv:1907.10830): two generators, four discriminators, 671M parameters.

670,761,088 parameters, counted from the authors' PyTorch code with its defaults (full version, 256 x 256 pixels, 64
channels, 4 residual blocks), which BytePS's artifact trains. A published exact number was not found; of the light
version this count gives 21.2M + 112.8M, which a later paper prints (NICE-GAN, arXiv:2003.00273). Four fifths are two
dense layers of 1.07 GB each, the largest tensors of all lists here.
"""
from __future__ import annotations

from .model_shapes import Shapes

_UGATIT_CHANNELS, _UGATIT_N_BLOCKS, _UGATIT_PIXELS = 64, 4, 256
#: Layers of the global and of the local discriminators.
_UGATIT_GLOBAL, _UGATIT_LOCAL = 7, 5


def ugatit(light: bool = False) -> Shapes:
    """Return name -> shape, generators first: one step trains both halves one after the other."""
    shapes: Shapes = {}
    for name in ("A2B", "B2A"):
        _generator(shapes, f"generator{name}", light)
    for name, n_layers in (("GA", _UGATIT_GLOBAL), ("GB", _UGATIT_GLOBAL), ("LA", _UGATIT_LOCAL), ("LB", _UGATIT_LOCAL)):
        _discriminator(shapes, f"discriminator{name}", n_layers)
    return shapes


def _generator(shapes: Shapes, at: str, light: bool) -> None:
    width = 4 * _UGATIT_CHANNELS
    shapes[f"{at}.down0"] = (_UGATIT_CHANNELS, 3, 7, 7)
    shapes[f"{at}.down1"] = (2 * _UGATIT_CHANNELS, _UGATIT_CHANNELS, 3, 3)
    shapes[f"{at}.down2"] = (width, 2 * _UGATIT_CHANNELS, 3, 3)
    for block in range(_UGATIT_N_BLOCKS):
        for i in (1, 2):
            shapes[f"{at}.down_block{block}.conv{i}"] = (width, width, 3, 3)
    _attention(shapes, at, width)
    shapes[f"{at}.fc1"] = (width, width if light else (_UGATIT_PIXELS // 4) ** 2 * width)
    for name in ("fc2", "gamma", "beta"):
        shapes[f"{at}.{name}"] = (width, width)
    for block in range(_UGATIT_N_BLOCKS):
        for i in (1, 2):
            shapes[f"{at}.up_block{block}.conv{i}"] = (width, width, 3, 3)
            shapes[f"{at}.up_block{block}.norm{i}.rho"] = (1, width, 1, 1)
    for i, n_out in ((1, 2 * _UGATIT_CHANNELS), (2, _UGATIT_CHANNELS)):
        shapes[f"{at}.up{i}"] = (n_out, 2 * n_out, 3, 3)
        for name in ("rho", "gamma", "beta"):
            shapes[f"{at}.up{i}.norm.{name}"] = (1, n_out, 1, 1)
    shapes[f"{at}.up3"] = (3, _UGATIT_CHANNELS, 7, 7)


def _discriminator(shapes: Shapes, at: str, n_layers: int) -> None:
    n_in, n_out = 3, _UGATIT_CHANNELS
    for layer in range(n_layers - 1):
        shapes[f"{at}.conv{layer}.weight"], shapes[f"{at}.conv{layer}.bias"] = (n_out, n_in, 4, 4), (n_out,)
        n_in, n_out = n_out, 2 * n_out
    _attention(shapes, at, n_in)
    shapes[f"{at}.conv"] = (1, n_in, 4, 4)


def _attention(shapes: Shapes, at: str, width: int) -> None:
    """The class activation map: two logits from pooled channels, and the 1x1 convolution that joins both halves."""
    shapes[f"{at}.gap_fc"] = shapes[f"{at}.gmp_fc"] = (1, width)
    shapes[f"{at}.conv1x1.weight"], shapes[f"{at}.conv1x1.bias"] = (width, 2 * width, 1, 1), (width,)
