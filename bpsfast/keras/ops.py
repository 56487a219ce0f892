"""push_pull and broadcast of values outside compiled programs, with the signatures of `byteps.keras`."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ..orchestration.errors import ConfigError, UnsupportedError
from ..trainer import broadcaster, handle as operations
from .backend import tensor_backend
from .variables import broadcast_variables, host_copy, state_of


def push_pull(value: Any, name: str | None = None, average: bool = True) -> Any:
    """Return the mean (sum) of *value* over all ranks; means of integers are rounded down (floor).

    Parameters
    ----------
    value
        A tensor of Keras's backend or a variable, for which a tensor is returned; or a NumPy array, a number or a list
        of numbers, for which an array is returned. Keras chooses the dtype of numbers. Shape and dtype are the same on
        all ranks.
    name
        The name that the calls of all ranks have in common; None: as of `bpsfast.push_pull`.

    Raises
    ------
    UnsupportedError
        For an unsupported dtype, and inside a function that is being compiled.
    MismatchError, BusyError, ClosedError, StallError, PeerLostError
        As `bpsfast.push_pull`.
    """
    return _like(value, operations.push_pull(_host(value, "push_pull"), average, name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return rank *root_rank*'s *value* on all ranks. All ranks call their broadcasts in the same order.

    Takes and returns the same types as `push_pull`. *name* must be the same on all ranks.

    Raises
    ------
    UnsupportedError
        For an unsupported dtype, and inside a function that is being compiled.
    MismatchError, ConfigError, StallError, PeerLostError
        As `bpsfast.broadcast`.
    """
    host = np.array(_host(value, "broadcast"))  # a copy, which is overwritten
    return _like(value, broadcaster.broadcast(host, root_rank, name))


def broadcast_global_variables(root_rank: int, of: Any = None) -> None:
    """Overwrite variables on all ranks with those of rank *root_rank*.

    Parameters
    ----------
    of
        A model, for its weights and its optimizer's variables, or a list of variables. It is required, as Keras 3 has
        no list of all variables.

    Raises
    ------
    UnsupportedError
        Without *of*.
    ConfigError
        If *of* is something else, or a model that is not built; if there is no rank *root_rank*.
    MismatchError, StallError, PeerLostError
        As `variables.broadcast_variables`.
    """
    if of is None:
        raise UnsupportedError(f"broadcast_global_variables({root_rank}): Keras 3 has no list of global variables; use "
                               "BroadcastGlobalVariablesCallback in fit(), or broadcast_global_variables("
                               f"{root_rank}, model)")
    if isinstance(of, keras.Model):
        variables = state_of(of)
    elif isinstance(of, Sequence) and all(hasattr(each, "assign") for each in of):
        variables = list(of)
    else:
        raise ConfigError(f"expected a keras.Model or a list of variables, got {type(of).__name__}")
    broadcast_variables(variables, root_rank)


def _host(value: Any, what: str) -> np.ndarray[Any, Any]:
    if is_tensor(value):
        if tensor_backend().is_symbolic(getattr(value, "value", value)):
            raise UnsupportedError(f"{what} of a tensor of shape {tuple(value.shape)} inside a function that is being "
                                   "compiled: call it outside; DistributedOptimizer sums inside, too")
        return host_copy(value)
    if isinstance(value, np.ndarray | np.generic):
        return np.ascontiguousarray(value).reshape(value.shape)
    try:
        return host_copy(keras.ops.convert_to_tensor(value))
    except (TypeError, ValueError) as exc:
        raise UnsupportedError(f"{what} of a {type(value).__name__}: only tensors and numbers are taken "
                               f"({exc})") from exc


def is_tensor(value: Any) -> bool:
    """Return whether *value* is a tensor of Keras's backend or a variable."""
    return isinstance(value, keras.Variable) or bool(keras.ops.is_tensor(value))


def _like(value: Any, result: np.ndarray[Any, Any]) -> Any:
    return keras.ops.convert_to_tensor(result) if is_tensor(value) else result
