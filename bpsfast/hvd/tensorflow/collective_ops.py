"""`horovod.tensorflow`'s allreduce, allgather, broadcast and others, for TensorFlow tensors.

`bpsfast.tensorflow` carries out those that it has, `bpsfast.hvd.torch` the others, which need PyTorch.
"""
from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ...orchestration.errors import ConfigError, UnsupportedError
from ...tensorflow.broadcast import (
    broadcast as _broadcast,
    broadcast_object as _broadcast_object,
    broadcast_variables as _broadcast_variables,
    refuse_tracing,
    resources,
)
from ...tensorflow.compression import Compression, CompressionLike, parted
from ...tensorflow.memory import computed, dense
from ...tensorflow.ops import push_pull, reduced
from ...trainer import process
from ..reduce_op import Average, ReduceOp, Sum, chosen, factor
from ..runtime import ProcessSet, checked_set, global_process_set

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]


def allreduce(tensor: Any, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
              compression: CompressionLike = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return *tensor* reduced over all ranks of *process_set*, with factors before and after.

    Average and Sum over all ranks are `bpsfast.tensorflow.push_pull`; averages and products of integers are truncated
    towards zero. Differentiable except for Min, Max and Product. Those, and process sets, need dense tensors and
    PyTorch.

    Raises
    ------
    ConfigError, UnsupportedError
        If an argument is invalid; nothing is sent.
    HorovodInternalError, MismatchError, StallError, PeerLostError
        As `bpsfast.hvd.torch.allreduce`, `bpsfast.tensorflow.push_pull`.
    """
    reduction = chosen(op, average)
    if is_global(process_set) and reduction in (Average, Sum):
        before = scaled(tensor, prescale_factor, "prescale_factor")
        factor("postscale_factor", postscale_factor)
        divides = reduction == Average and _is_integer(before)
        total = push_pull(before, "", None, device_dense, device_sparse, compression,
                          int(Sum if divides else reduction), name=name)
        return scaled(_divided(total) if divides else total, postscale_factor, "postscale_factor")
    return _negotiated("allreduce", [tensor], name, compression, reduction, prescale_factor, postscale_factor,
                       process_set)[0]


def grouped_allreduce(tensors: Sequence[Any], average: bool | None = None, device_dense: str = "",
                      device_sparse: str = "", compression: CompressionLike = Compression.none,
                      op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False, *,
                      name: str | None = None) -> list[Any]:
    """Return *tensors* reduced as by `allreduce`, all at the same time. *ignore_name_scope* is Horovod's.

    None among *tensors*, the same on all ranks, stays None. *name* is the prefix of the tensors' names. None: it is
    made of their dtypes and shapes.
    """
    reduction = chosen(op, average)
    if not is_global(process_set) or reduction not in (Average, Sum):
        there = [tensor for tensor in tensors if tensor is not None]
        found = iter(_negotiated("allreduce", there, name, compression, reduction, prescale_factor, postscale_factor,
                                 process_set) if there else ())
        return [None if tensor is None else next(found) for tensor in tensors]
    ready = [scaled(tensor, prescale_factor, "prescale_factor") for tensor in tensors]
    factor("postscale_factor", postscale_factor)
    title = name or f"grouped_allreduce.{_digest(ready, reduction)}"
    divides = reduction == Average and any(map(_is_integer, ready))
    sums = reduced(ready, [f"{title}.{place}" for place in range(len(ready))], reduction == Average and not divides,
                   compression=compression, sparse_as_dense=False, has_shapes_behind=name is None)
    return [scaled(_divided(total) if divides else total, postscale_factor, "postscale_factor") for total in sums]


def reducescatter(tensor: Any, device_dense: str = "", compression: CompressionLike = Compression.none,
                  op: int = Average, name: str | None = None, process_set: ProcessSet = global_process_set,
                  prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> Any:
    """Return this rank's rows of *tensor* averaged (summed) over all ranks of *process_set*.

    Rows are divided as evenly as possible, with the remainder on the first ranks. Needs PyTorch. The gradient is, as
    Horovod's, that of all ranks' rows, for Sum times the number of ranks.
    """
    return grouped_reducescatter([tensor], device_dense, compression, op, process_set, prescale_factor,
                                 postscale_factor, name=name)[0]


def grouped_reducescatter(tensors: Sequence[Any], device_dense: str = "",
                          compression: CompressionLike = Compression.none, op: int = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0, *, name: str | None = None) -> list[Any]:
    """Return this rank's rows of each of *tensors*, reduced as a group, as by `reducescatter`."""
    reduction = chosen(op)
    if reduction not in (Average, Sum):
        raise UnsupportedError(f"reducescatter by {reduction.name}: only Average and Sum are there, as in Horovod")
    return _negotiated("reducescatter", tensors, name, compression, reduction, prescale_factor, postscale_factor,
                       process_set)


def _negotiated(kind: str, tensors: Sequence[Any], name: str | None, compression: CompressionLike, op: ReduceOp,
                prescale: float, postscale: float, process_set: ProcessSet) -> list[Any]:
    """Reduce dense *tensors* as a group by `bpsfast.hvd.torch`. *kind*: "allreduce" or "reducescatter"."""
    compressor, choice = parted(compression)
    if choice is not None:
        raise UnsupportedError("codecs are for what is summed over all ranks; process sets, reducescatter, Min, Max "
                               "and Product take a compressor, such as Compression.fp16")
    pairs = [compressor.compress(dense(tensor, f"the tensor of {kind}")) for tensor in tensors]
    scatters = kind == "reducescatter"
    api = begun(kind if scatters else f"{kind} by {op.name} over {process_set}")

    def reduce(*arrays: Any) -> Any:
        return getattr(api, f"grouped_{kind}")(list(arrays), name=name, op=op, prescale_factor=prescale,
                                               postscale_factor=postscale, process_set=process_set)

    def run(*given: Any) -> list[Any]:
        return computed(reduce, given, [(each.dtype, rows_of(each) if scatters else each.shape) for each in given])

    def back(*gradients: Any) -> list[Any]:
        if op not in (Average, Sum):
            raise UnsupportedError(f"allreduce by {op.name} has no gradient here: tf.stop_gradient, or Average or Sum")
        if not scatters:
            return _negotiated(kind, gradients, None, Compression.none, op, prescale, postscale, process_set)
        share = prescale * postscale * (process_set.size() or 1 if op == Sum else 1)
        return grouped_allgather([scaled(each, share) for each in gradients], process_set=process_set)

    results = differentiable(run, back, [tensor for tensor, _ in pairs])
    return [compressor.decompress(result, context) for result, (_, context) in zip(results, pairs)]


def _digest(tensors: Sequence[Any], op: ReduceOp) -> str:
    kinds = [(tf.as_dtype(getattr(each, "dtype", tf.float32)).name, isinstance(each, tf.IndexedSlices))
             for each in tensors]
    return hashlib.sha256(repr((kinds, op.name)).encode()).hexdigest()[:8]


def scaled(tensor: Any, by: float, what: str = "factor") -> Any:
    """Return *tensor*, dense, rows or None, times *by*; integers are multiplied in float64 and truncated towards zero.

    Raises `ConfigError`, which names it as *what*, if *by* is not a number.
    """
    number = factor(what, by)
    if tensor is None or number == 1.0:
        return tensor

    def product(values: Any) -> Any:
        if values.dtype.is_floating or values.dtype.is_complex:
            return values * tf.cast(number, values.dtype)
        return tf.cast(tf.cast(values, tf.float64) * number, values.dtype)

    return _with_values(tensor, product)


def _is_integer(tensor: Any) -> bool:
    return tensor is not None and tf.as_dtype(_values(tensor).dtype).is_integer


def _divided(tensor: Any) -> Any:
    """Divide a sum over all ranks by their number; integers are truncated towards zero, as by Horovod."""
    def mean(values: Any) -> Any:
        n_ranks = tf.cast(process.current().size, values.dtype)
        return tf.truncatediv(values, n_ranks) if values.dtype.is_integer else values / n_ranks

    return None if tensor is None else _with_values(tensor, mean)


def _values(tensor: Any) -> Any:
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tf.convert_to_tensor(tensor)


def _with_values(tensor: Any, change: Callable[[Any], Any]) -> Any:
    changed = change(_values(tensor))
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(changed, tensor.indices, tensor.dense_shape)
    return changed


def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return *tensor* of all ranks of *process_set*, concatenated in their order along the first dimension, which may
    differ. *ignore_name_scope* is Horovod's.

    The gradient is, as Horovod's, the mean of the ranks' gradients of this rank's rows.

    Raises
    ------
    UnsupportedError
        If it is not a dense tensor of numbers, or PyTorch is not installed.
    HorovodInternalError
        As `bpsfast.hvd.torch.allgather`.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False,
                      process_set: ProcessSet = global_process_set) -> list[Any]:
    """As `allgather` of each of *tensors*; none is gathered before all are submitted on all ranks."""
    given = [dense(tensor, "the tensor of allgather") for tensor in tensors]
    api = begun("allgather")

    def run(*these: Any) -> list[Any]:
        return computed(lambda *arrays: api.grouped_allgather(list(arrays), name, process_set), these,
                    [(each.dtype, rows_of(each)) for each in these])

    def back(*gradients: Any) -> list[Any]:
        means = grouped_allreduce(list(gradients), op=Average, process_set=process_set)
        rows = allgather([[tf.shape(each)[0] for each in given]], process_set=process_set)  # of each on each rank
        me = process_set.rank() or 0
        return [mean[tf.reduce_sum(rows[:me, place]):tf.reduce_sum(rows[: me + 1, place])]
                for place, mean in enumerate(means)]

    return differentiable(run, back, given)


def alltoall(tensor: Any, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False,
             process_set: ProcessSet = global_process_set) -> Any:
    """Return the rows that all ranks of *process_set* have sent to this one, in their order.

    *splits*: how many rows go to each rank; then also return how many came from each. None: the same number to each.
    Gradients return to the ranks that sent the rows.
    """
    given = dense(tensor, "the tensor of alltoall")
    rows = None if splits is None else _integers(splits)
    api = begun("alltoall")

    def exchange(array: Any, counts: Any = None) -> list[Any]:
        found = api.alltoall(array, counts, name, process_set)
        return list(found) if isinstance(found, tuple) else [found]

    if rows is None:
        def even(x: Any) -> list[Any]:
            return computed(exchange, [x], [(x.dtype, rows_of(x))])

        return differentiable(even, lambda dy: [alltoall(dy, process_set=process_set)], [given])[0]
    received: list[Any] = []

    def run(x: Any) -> list[Any]:
        output, came = computed(exchange, [x, rows], [(x.dtype, rows_of(x)), (tf.int32, [None])])
        received.append(came)
        return [output]

    def back(dy: Any) -> list[Any]:
        returned, _ = alltoall(dy, received[-1], process_set=process_set)
        unsent = tf.shape(given)[0] - tf.shape(returned)[0]  # rows beyond the sum of splits were not sent
        return [tf.concat([returned, tf.zeros(tf.concat([[unsent], tf.shape(returned)[1:]], 0), returned.dtype)], 0)]

    (output,) = differentiable(run, back, [given])
    return output, received[-1]


def _integers(splits: Any) -> Any:
    found = dense(splits, "splits of alltoall")
    if not found.dtype.is_integer:
        raise ConfigError(f"alltoall expects splits to contain 32-bit integer elements. (got {found.dtype.name})")
    return tf.cast(found, tf.int32)


def allgather_object(obj: Any, session: Any = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the *obj* of each rank of *process_set*, in their order; it is pickled. *session* is TensorFlow 1's.

    Raises UnsupportedError inside `tf.function`, which would send it only when it is traced.
    """
    refuse_tracing("allgather_object", obj)
    found: list[Any] = begun("allgather_object").allgather_object(obj, name, process_set)
    return found


def broadcast(tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return job rank *root_rank*'s *tensor* on all ranks of *process_set*. The gradient is none.

    Raises as `bpsfast.tensorflow.broadcast`, for a set as `bpsfast.hvd.torch.broadcast`, which needs PyTorch.
    """
    if is_global(process_set):
        return _broadcast(tensor, root_rank, name=name)
    given = dense(tensor, "the tensor of broadcast")
    api = begun(f"broadcast in {process_set}")
    return computed(lambda array: [api.broadcast(array, root_rank, name, process_set)], [given],
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
    refuse_tracing("broadcast_object", obj)
    return begun("broadcast_object").broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(root_rank: int = 0, session: Any = None, name: str | None = None,
                        process_set: ProcessSet = global_process_set) -> Callable[[Any], Any]:
    """Return a function of one object: `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def is_global(process_set: ProcessSet) -> bool:
    """Return whether *process_set* is that of all ranks; raises `ConfigError` if it is not a process set."""
    return checked_set(process_set) is global_process_set


def begun(what: str) -> Any:
    """Return `bpsfast.hvd.torch`, initialized, for *what*.

    Raises ClosedError before `init`, and UnsupportedError, which names *what*, without PyTorch.
    """
    process.current()
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(f"{what} needs PyTorch here, which executes what ranks negotiate: pip install "
                               "'bpsfast[torch]' (allreduce, broadcast and gradients of all ranks do without)")
    api = importlib.import_module("bpsfast.hvd.torch")
    api.init()
    return api


def differentiable(run: Callable[..., list[Any]], back: Callable[..., list[Any]], tensors: Sequence[Any]) -> list[Any]:
    """Return *run* of *tensors*; its gradient is *back* of the results' gradients if all are floating-point tensors."""
    if not all(tensor.dtype.is_floating for tensor in tensors):
        return run(*tensors)

    @tf.custom_gradient
    def operation(*given: Any) -> Any:
        return run(*given), lambda *gradients: back(*gradients)

    found = operation(*tensors)
    return list(found) if isinstance(found, list | tuple) else [found]


def rows_of(tensor: Any) -> tf.TensorShape:
    """Return the shape of *tensor* with any number of rows."""
    shape: tf.TensorShape = tensor.shape
    return tf.TensorShape([None]).concatenate(shape[1:]) if shape.rank else tf.TensorShape(None)
