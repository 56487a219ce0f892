"""broadcast of tensors, variables and objects: to all ranks as `bpsfast.tensorflow`, to a set as ranks negotiate it."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ...orchestration.errors import UnsupportedError
from ...tensorflow.broadcast import (
    broadcast as _broadcast,
    broadcast_object as _broadcast_object,
    broadcast_variables as _broadcast_variables,
    resources,
)
from ..process_sets import ProcessSet, global_process_set
from .negotiated import begun, dense, is_global, made


def broadcast(tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return job rank *root_rank*'s *tensor* on all ranks of *process_set*. The gradient is none.

    Raises as `bpsfast.tensorflow.broadcast`, for a set as `bpsfast.hvd.torch.broadcast`, which needs PyTorch.
    """
    if is_global(process_set):
        return _broadcast(tensor, root_rank, name=name)
    given = dense(tensor, "broadcast")
    api = begun(f"broadcast in {process_set}")
    return made(lambda array: [api.broadcast(array, root_rank, name, process_set)], [given],
                [(given.dtype, given.shape)])[0]


def broadcast_(variables: Iterable[Any], root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> list[Any]:
    """Overwrite *variables* by those of job rank *root_rank*, and return them."""
    given = list(variables)
    broadcast_variables(given, root_rank, process_set)
    return given


def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> Any:
    """Overwrite *variables* by those of job rank *root_rank*, on all ranks of *process_set*; *inplace* is Horovod's."""
    if is_global(process_set):
        return _broadcast_variables(variables, root_rank)
    found = resources(variables)
    for variable in found:
        variable.assign(broadcast(variable.read_value(), root_rank, process_set=process_set), read_value=False)
    return None


def broadcast_object(obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return job rank *root_rank*'s *obj* on all ranks of *process_set*: as `bpsfast.tensorflow.broadcast_object`."""
    if is_global(process_set):
        return _broadcast_object(obj, root_rank, session, name)
    if tf.inside_function():
        raise UnsupportedError("broadcast_object inside tf.function, which would send it when it is traced and never "
                               "again: call it outside")
    return begun("broadcast_object").broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(root_rank: int = 0, session: Any = None, name: str | None = None,
                        process_set: ProcessSet = global_process_set) -> Callable[[Any], Any]:
    """Return a function of one object: `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)
