"""The shapes of ResNet-50's 161 parameters (torchvision's resnet50), in forward order: 25.6 M, most of them tiny."""
from __future__ import annotations

from math import prod

_BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, bottleneck blocks
_EXPANSION = 4


def gradients() -> dict[str, tuple[int, ...]]:
    """Return name -> shape: every convolution's weight, every normalisation's weight and bias, the classifier."""
    shapes: dict[str, tuple[int, ...]] = {}

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
    shapes["fc.weight"], shapes["fc.bias"] = (1000, n_in), (1000,)
    return shapes


def nbytes() -> int:
    """Return the bytes of all of them in float32."""
    return 4 * sum(prod(shape) for shape in gradients().values())
