"""Names variables of Keras alike on all ranks, and broadcasts one rank's variables.

Keras numbers the names that it makes (``dense_2``) in the order of the process. A rank that has loaded one more model
has other numbers, so names are made of paths without numbers.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ..orchestration.errors import ConfigError
from ..trainer import process
from ..trainer.object_broadcast import broadcast_arrays

_NUMBER = re.compile(r"_\d+(?=[/_]|$)")


def path_of(variable: Any) -> str:
    """Return the path of *variable*; `tf.Variable`s have a name instead."""
    return str(getattr(variable, "path", None) or variable.name)


def without_numbers(path: str) -> str:
    """Return *path* without the numbers that Keras appends to words."""
    return _NUMBER.sub("", path)


def common_names(paths: Sequence[str]) -> list[str]:
    """Return a different name for each of *paths*: without Keras's numbers, repeated ones with a count."""
    return make_unique([without_numbers(path) for path in paths])


def make_unique(names: Sequence[str]) -> list[str]:
    """Return *names*, repeated ones with a count appended: "a", "a#2"."""
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return found


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrite *variables* on all ranks with those of rank *root_rank*, in one broadcast.

    Raises MismatchError, which names the first one, if the ranks' variables differ in path, dtype or shape; none is
    changed then. Other errors: `bpsfast.broadcast`.
    """
    names = common_names([path_of(variable) for variable in variables])
    received = broadcast_arrays(list(zip(names, map(host_copy, variables))), root_rank, "variables")
    if process.current().rank != root_rank:
        for variable, array in zip(variables, received):
            variable.assign(array)


def state_of(model: Any) -> list[Any]:
    """Return the variables of *model* and its optimizer, without states of random generators, which differ by rank.

    Raises ConfigError if *model* is not a built model of Keras 3.
    """
    if not isinstance(model, keras.Model):
        raise ConfigError(f"expected a keras.Model, got {type(model).__name__}")
    if not is_built(model):
        raise ConfigError(f"model {model.name!r} is not built, so it has no variables to broadcast. Give it an "
                          "Input, call model.build(), or use BroadcastGlobalVariablesCallback")
    optimizer = getattr(model, "optimizer", None)
    return [*model.weights, *(optimizer.variables if optimizer is not None else ())]


def is_built(model: Any) -> bool:
    """Return whether *model* has all its variables."""
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())


def host_copy(value: Any) -> np.ndarray[Any, Any]:
    """Return the elements of *value*, a tensor or a variable, contiguous on the CPU."""
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return np.ascontiguousarray(array).reshape(array.shape)
