"""The models by name, small and full; torch is imported when one is made."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.planner import catalog

if TYPE_CHECKING:
    from torch import nn

SIZES = ("small", "full")
_SMALL_PIXELS, _SMALL_CLASSES, _SMALL_WORDS, _SMALL_LENGTH = 32, 10, 1000, 32
_PIXELS, _CLASSES = 224, 1000
_UGATIT_DIVISOR = 256


class Shape(NamedTuple):
    """One size of a model. Images are *pixels* on a side, of *n_classes*; sentences *length* long, of *n_words*.

    `batch`: samples of a rank in a step, unless another number is asked for. `make` returns a module whose forward
    takes (inputs, labels) and returns the loss.
    """

    make: Callable[[], nn.Module]
    batch: int
    pixels: int = 0
    n_classes: int = 0
    length: int = 0
    n_words: int = 0


def shape_of(name: str, size: str) -> Shape:
    """Return model *name* in *size*, one of `SIZES`.

    Raises
    ------
    ConfigError
        If there is no such model or size.
    """
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is not among those that train: {', '.join(MODELS)}")
    if size not in SIZES:
        raise ConfigError(f"size {size!r} is none of {', '.join(SIZES)}")
    return MODELS[name](size == "full")


def _resnet50(full: bool) -> Shape:
    def make() -> nn.Module:
        from bpsfast.bench.training.networks import ResNet

        return ResNet((3, 4, 6, 3), 64, _CLASSES) if full else ResNet((1, 1, 1, 1), 8, _SMALL_CLASSES)

    return _images(make, 256, full)


def _vgg16(full: bool) -> Shape:
    def make() -> nn.Module:
        from bpsfast.bench.training.networks import VGG16, Vgg

        if full:
            return Vgg(VGG16, 4096, _PIXELS, _CLASSES)
        return Vgg(((8,), (16,), (32,)), 128, _SMALL_PIXELS, _SMALL_CLASSES)

    return _images(make, 96, full)


def _ugatit(full: bool) -> Shape:
    def make() -> nn.Module:
        from bpsfast.bench.training.networks import GradientList

        return GradientList(catalog.load("ugatit").shapes if full else catalog.divided("ugatit", _UGATIT_DIVISOR))

    return Shape(make, 2, pixels=256 if full else _SMALL_PIXELS, n_classes=_CLASSES if full else _SMALL_CLASSES)


def _transformer(full: bool) -> Shape:
    n_words = 33708 if full else _SMALL_WORDS

    def make() -> nn.Module:
        from bpsfast.bench.training.networks import Transformer

        return Transformer(n_words, 512, 8, 2048, 6) if full else Transformer(n_words, 64, 4, 256, 2)

    return _sentences(make, 12, 256, n_words, full)


def _bert_large(full: bool) -> Shape:
    n_words = 30522 if full else _SMALL_WORDS

    def make() -> nn.Module:
        from bpsfast.bench.training.networks import Bert

        return Bert(n_words, 512, 1024, 16, 24) if full else Bert(n_words, _SMALL_LENGTH, 64, 4, 2)

    return _sentences(make, 64, 128, n_words, full)


def _gpt2(full: bool) -> Shape:
    n_words = 50257 if full else _SMALL_WORDS

    def make() -> nn.Module:
        from bpsfast.bench.training.networks import Gpt2

        return Gpt2(n_words, 1024, 768, 12, 12) if full else Gpt2(n_words, _SMALL_LENGTH, 64, 4, 2)

    return _sentences(make, 1, 80, n_words, full)


def _images(make: Callable[[], nn.Module], batch: int, full: bool) -> Shape:
    return Shape(make, batch if full else 16, pixels=_PIXELS if full else _SMALL_PIXELS,
                 n_classes=_CLASSES if full else _SMALL_CLASSES)


def _sentences(make: Callable[[], nn.Module], batch: int, length: int, n_words: int, full: bool) -> Shape:
    return Shape(make, batch if full else 8, length=length if full else _SMALL_LENGTH, n_words=n_words)


#: Name -> its shape, full or not. Full batches are a GPU's in figures 15 and 16 of BytePS's paper.
MODELS: dict[str, Callable[[bool], Shape]] = {
    "resnet50": _resnet50, "vgg16": _vgg16, "transformer": _transformer, "bert-large": _bert_large, "gpt2": _gpt2,
    "ugatit": _ugatit}
