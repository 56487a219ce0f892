"""The models that `bench model` trains, by name, small and full; making one imports torch."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.planner import catalog

if TYPE_CHECKING:
    from torch import nn

SIZES = ("small", "full")


class Shape(NamedTuple):
    """One size of a model, for images of `pixels` x `pixels` in `n_classes` or sentences of `length` out of `n_words`.

    `batch`: default number of samples of a rank in a step. `make` returns a module whose forward takes (inputs, labels)
    and returns the loss.
    """

    make: Callable[[], nn.Module]
    batch: int
    pixels: int = 0
    n_classes: int = 0
    length: int = 0
    n_words: int = 0


def shape_of(name: str, size: str) -> Shape:
    """Return model *name* in *size*, one of `SIZES`; raises `ConfigError` for unknown ones."""
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is not among those that train: {', '.join(MODELS)}")
    if size not in SIZES:
        raise ConfigError(f"size {size!r} is none of {', '.join(SIZES)}")
    return MODELS[name][SIZES.index(size)]


def _network(name: str, *arguments: Any) -> Callable[[], nn.Module]:
    """Return a function that makes an object of class *name* of `networks`, which imports torch."""
    def make() -> nn.Module:
        from bpsfast.bench.training import networks

        module: nn.Module = getattr(networks, name)(*(each() if callable(each) else each for each in arguments))
        return module

    return make


#: Channels of VGG-16's convolutions, in stages that each end with max-pooling over 2x2 pixels.
_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
#: Name -> small and full shape. Full batches are those of a GPU in figures 15 and 16 of BytePS's paper.
MODELS = {
    "resnet50": (Shape(_network("ResNet", (1, 1, 1, 1), 8, 10), 16, pixels=32, n_classes=10),
                 Shape(_network("ResNet", (3, 4, 6, 3), 64, 1000), 256, pixels=224, n_classes=1000)),
    "vgg16": (Shape(_network("Vgg", ((8,), (16,), (32,)), 128, 32, 10), 16, pixels=32, n_classes=10),
              Shape(_network("Vgg", _VGG16, 4096, 224, 1000), 96, pixels=224, n_classes=1000)),
    "transformer": (Shape(_network("Transformer", 1000, 64, 4, 256, 2), 8, length=32, n_words=1000),
                    Shape(_network("Transformer", 33708, 512, 8, 2048, 6), 12, length=256, n_words=33708)),
    "bert-large": (Shape(_network("Bert", 1000, 32, 64, 4, 2), 8, length=32, n_words=1000),
                   Shape(_network("Bert", 30522, 512, 1024, 16, 24), 64, length=128, n_words=30522)),
    "gpt2": (Shape(_network("Gpt2", 1000, 32, 64, 4, 2), 8, length=32, n_words=1000),
             Shape(_network("Gpt2", 50257, 1024, 768, 12, 12), 1, length=80, n_words=50257)),
    "ugatit": (Shape(_network("GradientList", lambda: catalog.divided("ugatit", 256)), 2, pixels=32, n_classes=10),
               Shape(_network("GradientList", lambda: catalog.load("ugatit").shapes), 2, pixels=256, n_classes=1000)),
}
