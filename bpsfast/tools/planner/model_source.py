"""Where a plan's model comes from: the catalog, a file of shapes, or a function that builds a torch module."""
from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...orchestration.errors import ConfigError
from ...orchestration.placement.partition import ITEM_NBYTES
from . import catalog
from .model import Model
from .model_shapes import Shapes

#: A file with more than this is no list of shapes.
_MOST_NBYTES = 64 << 20


def named(name: str, dtype: str | None = None) -> Model:
    """Return the built-in model *name* or, if there is none, that of the file *name*; *dtype* replaces its own.

    Raises
    ------
    ConfigError
        If there is neither, the file is unreadable or holds anything else, or the dtype has no kernel.
    """
    if name in catalog.MODELS:
        return _with_dtype(catalog.load(name), dtype)
    path = Path(name)
    if not path.exists() and os.sep not in name and not path.suffix:
        return catalog.load(name)  # says which there are
    return _with_dtype(Model(path.stem, path.name, _read(path)), dtype)


def from_torch(place: str, dtype: str | None = None) -> Model:
    """Return the model of the torch module that ``module:callable`` returns when it is called without arguments.

    Only parameters that take gradients count. Whatever the function raises becomes a ConfigError that quotes it.
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
        raise ConfigError(f"--from-torch {place!r}: its parameters are {' and '.join(sorted(dtypes))}; "
                          "say with --dtype in which one gradients travel")
    return _with_dtype(Model(function_name, place, shapes), dtype or dtypes.pop())


def _with_dtype(model: Model, dtype: str | None) -> Model:
    if dtype is not None and dtype not in ITEM_NBYTES:
        raise ConfigError(f"dtype {dtype!r} is not summed by any kernel; there are {', '.join(ITEM_NBYTES)}")
    return model if dtype is None else replace(model, dtype=dtype)


def _read(path: Path) -> Shapes:
    try:
        if path.stat().st_size > _MOST_NBYTES:
            raise ConfigError(f"model file {path}: {path.stat().st_size} bytes are no list of shapes")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise ConfigError(f"model file {path} cannot be read: {exc.strerror}; built-in models are "
                          f"{', '.join(catalog.MODELS)}") from exc
    except UnicodeDecodeError:
        raise ConfigError(f"model file {path} is no text; expected lines NAME SHAPE, such as fc.weight 4096x25088, "
                          "or JSON {\"NAME\": [4096, 25088]}") from None
    shapes = _of_json(path, text) if text.lstrip().startswith("{") else _of_lines(path, text)
    if not shapes:
        raise ConfigError(f"model file {path} names no tensor; expected lines NAME SHAPE, such as fc.weight 4096x25088")
    return shapes


def _of_json(path: Path, text: str) -> Shapes:
    try:
        told = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"model file {path} is no JSON: {exc}") from None
    return {name: _shape(path, name, lengths) for name, lengths in told.items()}


def _of_lines(path: Path, text: str) -> Shapes:
    shapes: Shapes = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not re.fullmatch(r"\d+(?:[x,]\d+)*", words[1]):
            raise ConfigError(f"model file {path}, line {number}: {line.strip()!r}: expected NAME SHAPE, such as "
                              "fc.weight 4096x25088")
        if words[0] in shapes:
            raise ConfigError(f"model file {path}, line {number}: tensor {words[0]!r} stands there twice")
        shapes[words[0]] = _shape(path, words[0], [int(length) for length in re.split("[x,]", words[1])])
    return shapes


def _shape(path: Path, name: str, lengths: Any) -> tuple[int, ...]:
    lengths = lengths.get("shape") if isinstance(lengths, Mapping) else lengths
    if not isinstance(lengths, list) or not all(type(length) is int and length > 0 for length in lengths):
        raise ConfigError(f"model file {path}: tensor {name!r} has the shape {lengths!r}; expected a list of positive "
                          "numbers")
    return tuple(lengths)
