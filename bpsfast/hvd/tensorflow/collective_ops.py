"""allreduce and reducescatter: of all ranks as `bpsfast.tensorflow` sums, else as ranks negotiate it."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ...orchestration.errors import UnsupportedError
from ...tensorflow.compression import Compression, CompressionLike, parted
from ...tensorflow.ops import push_pull, reduced
from ...trainer import process
from ..process_sets import ProcessSet, global_process_set
from ..reduce_op import Average, ReduceOp, Sum, chosen, factor
from . import gathering
from .negotiated import begun, dense, differentiable, is_global, made, rows_of


def allreduce(tensor: Any, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
              compression: CompressionLike = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return *tensor* reduced over all ranks of *process_set*, with factors before and after.

    Average and Sum of all ranks are `bpsfast.tensorflow.push_pull`; what becomes of integers by an average or a factor
    is cut off towards zero. Differentiable, but for Min, Max and Product. For these, and for process sets, tensors are
    dense, and PyTorch must be installed.

    Raises
    ------
    ConfigError, UnsupportedError
        If an argument is not possible; before anything is sent.
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
    return _negotiated([tensor], name, compression, reduction, prescale_factor, postscale_factor, process_set)[0]


def grouped_allreduce(tensors: Sequence[Any], average: bool | None = None, device_dense: str = "",
                      device_sparse: str = "", compression: CompressionLike = Compression.none,
                      op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False, *,
                      name: str | None = None) -> list[Any]:
    """Return *tensors* reduced as by `allreduce`; all are under way at once. *ignore_name_scope* is Horovod's.

    None among *tensors*, on all ranks alike, stays None. *name*: what names begin with. None: it is made of what the
    tensors are, and their shapes.
    """
    reduction = chosen(op, average)
    if not is_global(process_set) or reduction not in (Average, Sum):
        there = [tensor for tensor in tensors if tensor is not None]
        found = iter(_negotiated(there, name, compression, reduction, prescale_factor, postscale_factor, process_set)
                     if there else ())
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

    Rows are divided as evenly as can be, the first ranks get more. Needs PyTorch.

    The gradient is, as Horovod's, that of all ranks' rows, for Sum times the number of ranks.
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
    compressor = _compressor(compression)
    pairs = [compressor.compress(dense(tensor, "reducescatter")) for tensor in tensors]
    narrow = [tensor for tensor, _ in pairs]
    api = begun("reducescatter")

    def run(*given: Any) -> list[Any]:
        return made(lambda *arrays: api.grouped_reducescatter(
            list(arrays), name, op=reduction, process_set=process_set, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor), given, [(each.dtype, rows_of(each)) for each in given])

    def back(*gradients: Any) -> list[Any]:
        share = prescale_factor * postscale_factor * (process_set.size() or 1 if reduction == Sum else 1)
        return gathering.grouped_allgather([scaled(each, share) for each in gradients], process_set=process_set)

    results = differentiable(run, back, narrow)
    return [compressor.decompress(result, context) for result, (_, context) in zip(results, pairs)]


def _negotiated(tensors: Sequence[Any], name: str | None, compression: CompressionLike, op: ReduceOp, prescale: float,
                postscale: float, process_set: ProcessSet) -> list[Any]:
    compressor = _compressor(compression)
    pairs = [compressor.compress(dense(tensor, "allreduce")) for tensor in tensors]
    api = begun(f"allreduce by {op.name} over {process_set}")

    def run(*given: Any) -> list[Any]:
        return made(lambda *arrays: api.grouped_allreduce(
            list(arrays), name=name, op=op, prescale_factor=prescale, postscale_factor=postscale,
            process_set=process_set), given, [(each.dtype, each.shape) for each in given])

    def back(*gradients: Any) -> list[Any]:
        if op not in (Average, Sum):
            raise UnsupportedError(f"allreduce by {op.name} has no gradient here: tf.stop_gradient, or Average or Sum")
        return _negotiated(gradients, None, Compression.none, op, prescale, postscale, process_set)

    results = differentiable(run, back, [tensor for tensor, _ in pairs])
    return [compressor.decompress(result, context) for result, (_, context) in zip(results, pairs)]


def _compressor(compression: CompressionLike) -> Any:
    compressor, choice = parted(compression)
    if choice is not None:
        raise UnsupportedError("codecs are for what is summed over all ranks; process sets, reducescatter, Min, Max "
                               "and Product take a compressor, such as Compression.fp16")
    return compressor


def _digest(tensors: Sequence[Any], op: ReduceOp) -> str:
    kinds = [(tf.as_dtype(getattr(each, "dtype", tf.float32)).name, isinstance(each, tf.IndexedSlices))
             for each in tensors]
    return hashlib.sha256(repr((kinds, op.name)).encode()).hexdigest()[:8]


def scaled(tensor: Any, by: float, what: str = "factor") -> Any:
    """Return *tensor*, dense, rows or None, times *by*; integers are multiplied in float64, and cut off towards zero.

    Raises `ConfigError`, which names it as *what*, if *by* is no number.
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
    """Return a sum over all ranks as their average; integers are cut off towards zero, as Horovod's."""
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
