"""allgather and alltoall, and objects of all ranks: what ranks negotiate. They need PyTorch."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...orchestration.errors import ConfigError, UnsupportedError
from ..process_sets import ProcessSet, global_process_set
from ..reduce_op import Average
from .negotiated import begun, dense, differentiable, made, rows_of


def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return *tensor* of all ranks of *process_set*, concatenated in their order along the first dimension, which may
    differ. *ignore_name_scope* is Horovod's.

    The gradient is, as Horovod's, the mean of the ranks' gradients where this rank's rows are.

    Raises
    ------
    UnsupportedError
        If it is no dense tensor of numbers, or there is no PyTorch.
    HorovodInternalError
        As `bpsfast.hvd.torch.allgather`.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False,
                      process_set: ProcessSet = global_process_set) -> list[Any]:
    """As `allgather` of each of *tensors*; none is gathered before all are there on all ranks."""
    given = [dense(tensor, "allgather") for tensor in tensors]
    api = begun("allgather")

    def run(*these: Any) -> list[Any]:
        return made(lambda *arrays: api.grouped_allgather(list(arrays), name, process_set), these,
                    [(each.dtype, rows_of(each)) for each in these])

    def back(*gradients: Any) -> list[Any]:
        from .collective_ops import grouped_allreduce

        means = grouped_allreduce(list(gradients), op=Average, process_set=process_set)
        rows = allgather([[tf.shape(each)[0] for each in given]], process_set=process_set)  # of each on each rank
        me = process_set.rank() or 0
        return [mean[tf.reduce_sum(rows[:me, place]):tf.reduce_sum(rows[: me + 1, place])]
                for place, mean in enumerate(means)]

    return differentiable(run, back, given)


def alltoall(tensor: Any, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False,
             process_set: ProcessSet = global_process_set) -> Any:
    """Return the rows that all ranks of *process_set* have sent to this one, in their order; with *splits*, which says
    how many go to each, also how many came from each. None: equally many. Gradients go back to where rows came from.
    """
    given = dense(tensor, "alltoall")
    rows = None if splits is None else _integers(splits)
    api = begun("alltoall")

    def exchange(array: Any, counts: Any = None) -> list[Any]:
        found = api.alltoall(array, counts, name, process_set)
        return list(found) if isinstance(found, tuple) else [found]

    if rows is None:
        def even(x: Any) -> list[Any]:
            return made(exchange, [x], [(x.dtype, rows_of(x))])

        return differentiable(even, lambda dy: [alltoall(dy, process_set=process_set)], [given])[0]
    received: list[Any] = []

    def run(x: Any) -> list[Any]:
        output, came = made(exchange, [x, rows], [(x.dtype, rows_of(x)), (tf.int32, [None])])
        received.append(came)
        return [output]

    def back(dy: Any) -> list[Any]:
        returned, _ = alltoall(dy, received[-1], process_set=process_set)
        unsent = tf.shape(given)[0] - tf.shape(returned)[0]  # rows beyond the sum of splits went nowhere
        return [tf.concat([returned, tf.zeros(tf.concat([[unsent], tf.shape(returned)[1:]], 0), returned.dtype)], 0)]

    (output,) = differentiable(run, back, [given])
    return output, received[-1]


def _integers(splits: Any) -> Any:
    found = dense(splits, "alltoall's splits")
    if not found.dtype.is_integer:
        raise ConfigError(f"alltoall expects splits to contain 32-bit integer elements. (got {found.dtype.name})")
    return tf.cast(found, tf.int32)


def allgather_object(obj: Any, session: Any = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the *obj* of all ranks of *process_set*, in their order, pickled; *session* is TensorFlow 1's.

    Raises UnsupportedError inside `tf.function`, where it would be sent once for each trace.
    """
    if tf.inside_function():
        raise UnsupportedError(f"allgather_object of a {type(obj).__name__} inside tf.function, which would send it "
                               "when it is traced and never again: call it outside")
    found: list[Any] = begun("allgather_object").allgather_object(obj, name, process_set)
    return found
