"""The models of ``bpsfast plan``, the simulator and benchmarks: built in, or from a file or a torch module.

Built-in compute times are those on slides of BytePS's authors (HPC Interconnects Forum 2020), on one V100.
"""
from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ...orchestration.errors import ConfigError
from ...orchestration.messages import TensorSpec
from ...orchestration.placement.partition import ITEM_NBYTES
from . import model_shapes
from .model_shapes import Shapes


@dataclass(frozen=True)
class Compute:
    """Seconds of a forward and a backward pass with *batch* samples (`unit`) on one `hardware`."""

    forward_s: float
    backward_s: float
    batch: int
    unit: str
    hardware: str

    def of_batch(self, batch: int) -> Compute:
        """Return the times scaled to another batch, which is right if this batch kept the hardware busy."""
        factor = batch / self.batch
        return Compute(self.forward_s * factor, self.backward_s * factor, batch, self.unit, self.hardware)


@dataclass(frozen=True)
class Model:
    """One network. `dtype` is that of its gradients on the wire, as in `messages.TensorSpec`."""

    name: str
    title: str
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str = "float32"
    compute: Compute | None = None

    @property
    def n_parameters(self) -> int:
        """Number of parameters."""
        return sum(map(prod, self.shapes.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return self.n_parameters * ITEM_NBYTES[self.dtype]

    def specs(self) -> list[TensorSpec]:
        """Return the tensors as the PyTorch adapter declares them: one group, in the order of the forward pass."""
        return [TensorSpec(name=name, dtype=self.dtype, shape=shape, group=self.name)
                for name, shape in self.shapes.items()]


class _Entry(NamedTuple):
    """How to make one model; `compute` is None if it is not published."""

    title: str
    shapes: Callable[[], Shapes]
    dtype: str = "float32"
    compute: Compute | None = None


def _v100(forward_ms: float, backward_ms: float, batch: int, unit: str) -> Compute:
    return Compute(forward_ms / 1e3, backward_ms / 1e3, batch, unit, "V100")


# the authors train BERT with half-precision gradients (as their ideal times show), all others in float32
_ENTRIES: Mapping[str, _Entry] = {
    "resnet50": _Entry("ResNet-50", model_shapes.resnet50, "float32", _v100(32, 64, 32, "images")),
    "resnet18": _Entry("ResNet-18", model_shapes.resnet18),
    "vgg16": _Entry("VGG-16", model_shapes.vgg16, "float32", _v100(49, 100, 32, "images")),
    "vgg19": _Entry("VGG-19", model_shapes.vgg19),
    "inception-bn": _Entry("Inception-BN", model_shapes.inception_bn),
    "transformer": _Entry("Transformer base", model_shapes.transformer, "float32", _v100(95, 114, 16, "samples")),
    "bert-base": _Entry("BERT-base", model_shapes.bert_base, "float16", _v100(188, 281, 85, "samples")),
    "bert-large": _Entry("BERT-large", model_shapes.bert_large, "float16", _v100(339, 508, 35, "samples")),
    "gpt2": _Entry("GPT-2 small", model_shapes.gpt2),
    "ugatit": _Entry("U-GAT-IT", model_shapes.ugatit),
}

#: Name -> function that returns the shapes.
MODELS: Mapping[str, Callable[[], Shapes]] = {name: entry.shapes for name, entry in _ENTRIES.items()}


def load(name: str) -> Model:
    """Return the built-in model *name*; raise `ConfigError` if there is no such model."""
    if name not in _ENTRIES:
        raise ConfigError(f"model {name!r} is not built in; there are {', '.join(_ENTRIES)}")
    title, shapes, dtype, compute = _ENTRIES[name]
    return Model(name, title, shapes(), dtype, compute)


def n_elements(name: str) -> list[int]:
    """Return the number of elements of each parameter of model *name* (a key of `MODELS`)."""
    return [prod(shape) for shape in MODELS[name]().values()]


def divided(name: str, divisor: int) -> Shapes:
    """Return the tensors of model *name* as vectors with 1/*divisor* of their elements, at least one each."""
    return {tensor: (max(1, prod(shape) // divisor),) for tensor, shape in load(name).shapes.items()}

#: Largest file with a list of shapes.
_MOST_NBYTES = 64 << 20


def named(name: str, dtype: str | None = None) -> Model:
    """Return the built-in model *name* or, if there is none, the model in the file *name*; *dtype* overrides its dtype.

    Raises `ConfigError` if there is neither, the file is invalid, or the dtype has no kernel.
    """
    if name in MODELS:
        return _with_dtype(load(name), dtype)
    path = Path(name)
    if not path.exists() and os.sep not in name and not path.suffix:
        return load(name)  # raises with the list of models
    return _with_dtype(Model(path.stem, path.name, _read(path)), dtype)


def from_torch(place: str, dtype: str | None = None) -> Model:
    """Return the model of the torch module that ``module:callable`` returns when called without arguments.

    Only parameters with gradients count. An error of the callable becomes a ConfigError that quotes it.
    """
    module_name, colon, function_name = place.partition(":")
    if not (colon and module_name and function_name):
        raise ConfigError(f"--from-torch {place!r}: expected MODULE:CALLABLE, such as mynet:build")
    sys.path.insert(0, os.getcwd())
    try:
        built = getattr(importlib.import_module(module_name), function_name)()
        parameters = [(name, p) for name, p in built.named_parameters() if p.requires_grad]
        shapes = {name: tuple(int(length) for length in p.shape) for name, p in parameters}
        dtypes = {str(p.dtype).removeprefix("torch.") for _, p in parameters}
    except Exception as exc:
        raise ConfigError(f"--from-torch {place!r}: {type(exc).__name__}: {exc}") from exc
    finally:
        sys.path.remove(os.getcwd())
    if not shapes:
        raise ConfigError(f"--from-torch {place!r}: the module has no parameter that takes a gradient")
    if len(dtypes) > 1 and dtype is None:
        raise ConfigError(f"--from-torch {place!r}: its parameters are {' and '.join(sorted(dtypes))}; choose the "
                          "dtype of gradients with --dtype")
    return _with_dtype(Model(function_name, place, shapes), dtype or dtypes.pop())


def _with_dtype(model: Model, dtype: str | None) -> Model:
    if dtype is not None and dtype not in ITEM_NBYTES:
        raise ConfigError(f"dtype {dtype!r} has no sum kernel; supported: {', '.join(ITEM_NBYTES)}")
    return model if dtype is None else replace(model, dtype=dtype)


def _read(path: Path) -> Shapes:
    try:
        if path.stat().st_size > _MOST_NBYTES:
            raise ConfigError(f"model file {path}: {path.stat().st_size} bytes are too many for a list of shapes")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise ConfigError(f"model file {path} cannot be read: {exc.strerror}; built-in models are "
                          f"{', '.join(MODELS)}") from exc
    except UnicodeDecodeError:
        raise ConfigError(f"model file {path} is not text; expected lines NAME SHAPE, such as fc.weight 4096x25088, "
                          "or JSON {\"NAME\": [4096, 25088]}") from None
    try:
        listed = json.loads(text) if text.lstrip().startswith("{") else _of_lines(path, text)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"model file {path} is not JSON: {exc}") from None
    if not listed:
        raise ConfigError(f"model file {path} names no tensor; expected lines NAME SHAPE, such as fc.weight 4096x25088")
    return {name: _shape(path, name, lengths) for name, lengths in listed.items()}


def _of_lines(path: Path, text: str) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not re.fullmatch(r"\d+(?:[x,]\d+)*", words[1]):
            raise ConfigError(f"model file {path}, line {number}: {line.strip()!r}: expected NAME SHAPE, such as "
                              "fc.weight 4096x25088")
        if words[0] in shapes:
            raise ConfigError(f"model file {path}, line {number}: tensor {words[0]!r} occurs twice")
        shapes[words[0]] = [int(length) for length in re.split("[x,]", words[1])]
    return shapes


def _shape(path: Path, name: str, lengths: Any) -> tuple[int, ...]:
    lengths = lengths.get("shape") if isinstance(lengths, Mapping) else lengths
    if not isinstance(lengths, list) or not all(type(length) is int and length > 0 for length in lengths):
        raise ConfigError(f"model file {path}: tensor {name!r} has the shape {lengths!r}; expected a list of positive "
                          "numbers")
    return tuple(lengths)
