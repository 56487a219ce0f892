"""Variables of Keras on all ranks: those of one rank, given to the others."""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ..orchestration.errors import ConfigError
from ..trainer import process
from ..trainer.broadcaster import check_root
from ..trainer.object_broadcast import broadcast_arrays

_NUMBER = re.compile(r"_\d+(?=[/_]|$)")


def path_of(variable: Any) -> str:
    """Return the path of *variable*; `tf.Variable`s have a name instead."""
    return str(getattr(variable, "path", None) or variable.name)


def without_numbers(path: str) -> str:
    """Return *path* without the numbers at the ends of its words."""
    return _NUMBER.sub("", path)


def common_names(paths: Sequence[str]) -> list[str]:
    """Return names for *paths*, all different: without numbers, those that were there before with a count."""
    return different([without_numbers(path) for path in paths])


def different(names: Sequence[str]) -> list[str]:
    """Return *names*; those that were there before with a count behind them."""
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return found


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrite *variables* on all ranks by those of rank *root_rank*, in one stream.

    Raises
    ------
    MismatchError
        If the ranks' variables differ in path, dtype or shape; the text names the first that does. None is changed.
    ConfigError, StallError, PeerLostError
        As `bpsfast.broadcast`.
    """
    session = process.current()
    check_root(session, root_rank)
    names = common_names([path_of(variable) for variable in variables])
    received = broadcast_arrays(list(zip(names, map(host_copy, variables))), root_rank, "variables")
    if session.rank != root_rank:
        for variable, array in zip(variables, received):
            variable.assign(array)


def state_of(model: Any) -> list[Any]:
    """Return the variables of *model* and of its optimizer. States of random generators are each rank's own.

    Raises
    ------
    ConfigError
        If *model* is no model of Keras 3, or is not built.
    """
    if not isinstance(model, keras.Model):
        raise ConfigError(f"expected a keras.Model, got {type(model).__name__}")
    if not is_built(model):
        raise ConfigError(f"model {model.name!r} is not built: it has no variables yet to be broadcast; give it an "
                          "Input, call model.build(), or use BroadcastGlobalVariablesCallback")
    optimizer = getattr(model, "optimizer", None)
    return [*model.weights, *(optimizer.variables if optimizer is not None else ())]


def is_built(model: Any) -> bool:
    """Whether all variables of *model* are there."""
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())


def host_copy(value: Any) -> np.ndarray[Any, Any]:
    """Return the elements of *value*, a tensor or a variable, contiguous on the CPU."""
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return np.ascontiguousarray(array).reshape(array.shape)
