"""Broadcasts tensors, variables and objects of one rank to all, so that all ranks start from the same state."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ..orchestration.errors import UnsupportedError
from ..trainer import object_broadcast, process
from ..trainer.broadcaster import check_root
from ..trainer.object_broadcast import broadcast_arrays
from .memory import computed, dense


def broadcast(tensor: Any, root_rank: int, scope: str = "", name: str | None = None, is_variable: bool = False) -> Any:
    """Return rank *root_rank*'s *tensor* on all ranks. All ranks call their broadcasts in the same order.

    Eagerly and inside `tf.function`. Any dtype but strings; dtype and shape are the same on all ranks. With
    *is_variable* (BytePS's) the tensor is a `tf.Variable`, which is overwritten. It has no gradient.

    Raises
    ------
    UnsupportedError
        If it is not a dense tensor, or has strings.
    MismatchError, ConfigError, StallError, PeerLostError
        As `bpsfast.broadcast`.
    """
    title = f"{scope}{name or 'tensor'}"
    if is_variable:
        broadcast_variables([tensor], root_rank, scope)
        return tensor
    return _broadcast([tensor], [title], root_rank)[0]


def broadcast_variables(variables: Iterable[Any], root_rank: int, scope: str = "") -> Any:
    """Overwrite *variables*, of TensorFlow or Keras, on all ranks with those of rank *root_rank*, in the same order.

    Also inside `tf.function`. Returns None; in a graph of TensorFlow 1 an operation. Raises as `broadcast`.
    """
    found = resources(variables)
    names = [f"{scope}{place}" for place in range(len(found))]
    values = _broadcast([variable.read_value() for variable in found], names, root_rank)
    assigned = [variable.assign(value, read_value=False) for variable, value in zip(found, values)]
    if tf.compat.v1.executing_eagerly_outside_functions():
        return None
    return tf.group(*assigned)


def resources(variables: Iterable[Any]) -> list[Any]:
    """Return the `tf.Variable`s of *variables*, which may be Keras's; raises `UnsupportedError` for others."""
    found = [variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
             for variable in variables]
    for place, variable in enumerate(found):
        if not isinstance(variable, tf.Variable):
            raise UnsupportedError(f"variable {place} is a {type(variable).__name__}, not a tf.Variable: use broadcast")
    return found


def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcast all global variables of a graph of TensorFlow 1, as `broadcast_variables`.

    Raises UnsupportedError in eager execution, which has no such collection.
    """
    if tf.executing_eagerly():
        raise UnsupportedError("bps.broadcast_global_variables() does not support eager execution. Please use "
                               "`bps.broadcast_variables(<model/optimizer variables>)` instead.")
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_object(obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None) -> Any:
    """Return rank *root_rank*'s *obj* on all ranks (a copy elsewhere).

    All ranks call their broadcasts in the same order, with the same *name*. The object is pickled; *session*, of
    TensorFlow 1, is ignored.

    Raises
    ------
    UnsupportedError
        Inside `tf.function`, which would send it only when it is traced.
    ConfigError, MismatchError, StallError, PeerLostError
        As `bpsfast.broadcast`.
    """
    refuse_tracing("broadcast_object", obj)
    return object_broadcast.broadcast_object(obj, root_rank, name)


def refuse_tracing(operation: str, obj: Any) -> None:
    """Raise `UnsupportedError` for the *operation* on *obj* inside `tf.function`."""
    if tf.inside_function():
        raise UnsupportedError(f"{operation} of a {type(obj).__name__} inside tf.function, which would send it when it "
                               "is traced and never again: call it outside")


def broadcast_object_fn(root_rank: int = 0, session: Any = None, name: str | None = None) -> Callable[[Any], Any]:
    """Return a function of one object: `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts rank *root_rank*'s global variables when a session of TensorFlow 1 is made. *device* is BytePS's."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph."""
        self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast."""
        session.run(self._operation)


def _broadcast(tensors: Sequence[Any], names: Sequence[str], root_rank: int) -> list[Any]:
    check_root(process.current(), root_rank)
    given = [dense(tensor, repr(name)) for name, tensor in zip(names, tensors)]
    if not given:
        return []
    title = f"tensors of {names[0]} to {names[-1]}" if len(names) > 1 else f"tensor {names[0]}"

    def run(*arrays: Any) -> list[Any]:
        return broadcast_arrays(list(zip(names, arrays)), root_rank, title)

    return computed(run, given, [(tensor.dtype, tensor.shape) for tensor in given])
