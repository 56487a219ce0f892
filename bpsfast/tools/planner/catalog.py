"""The built-in models by name.

Compute times are those that BytePS's authors show on slides (HPC Interconnects Forum 2020), on one V100.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

from ...orchestration.errors import ConfigError
from . import bert, gpt2, inception, model_shapes, resnet, transformer, ugatit
from .model import Compute, Model
from .model_shapes import Shapes

_HARDWARE = "V100"


class _Entry(NamedTuple):
    """How to make one model: compute is (forward ms, backward ms, batch, of what), () where it is not published."""

    title: str
    shapes: Callable[[], Shapes]
    dtype: str = "float32"
    compute: tuple[float, float, int, str] | None = None


# The authors train BERT with half-precision gradients (their ideal times say so), all others in float32.
_ENTRIES: Mapping[str, _Entry] = {
    "resnet50": _Entry("ResNet-50", resnet.resnet50, "float32", (32, 64, 32, "images")),
    "resnet18": _Entry("ResNet-18", resnet.resnet18),
    "vgg16": _Entry("VGG-16", model_shapes.vgg16, "float32", (49, 100, 32, "images")),
    "vgg19": _Entry("VGG-19", model_shapes.vgg19),
    "inception-bn": _Entry("Inception-BN", inception.inception_bn),
    "transformer": _Entry("Transformer base", transformer.transformer, "float32", (95, 114, 16, "samples")),
    "bert-base": _Entry("BERT-base", bert.bert_base, "float16", (188, 281, 85, "samples")),
    "bert-large": _Entry("BERT-large", bert.bert_large, "float16", (339, 508, 35, "samples")),
    "gpt2": _Entry("GPT-2 small", gpt2.gpt2),
    "ugatit": _Entry("U-GAT-IT", ugatit.ugatit),
}

#: Name -> function that returns the shapes.
MODELS: Mapping[str, Callable[[], Shapes]] = {name: entry.shapes for name, entry in _ENTRIES.items()}


def load(name: str) -> Model:
    """Return the built-in model *name*.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    if name not in _ENTRIES:
        raise ConfigError(f"model {name!r} is not built in; there are {', '.join(_ENTRIES)}")
    title, shapes, dtype, compute = _ENTRIES[name]
    times = None
    if compute is not None:
        forward_ms, backward_ms, batch, unit = compute
        times = Compute(forward_ms / 1e3, backward_ms / 1e3, batch, unit, _HARDWARE)
    return Model(name, title, shapes(), dtype, times)


def n_elements(name: str) -> list[int]:
    """Return the elements of each parameter of model *name* (a key of `MODELS`)."""
    return [prod(shape) for shape in MODELS[name]().values()]


def divided(name: str, divisor: int) -> Shapes:
    """Return the tensors of model *name* as vectors of 1/*divisor* of their elements, at least one each."""
    return {tensor: (max(1, prod(shape) // divisor),) for tensor, shape in load(name).shapes.items()}
