"""Horovod's API for TensorFlow 2 (0.28), as far as programs that train need it: `bpsfast.tensorflow` by other names.

    import bpsfast.hvd.tensorflow as hvd                        # instead of: import horovod.tensorflow as hvd

Ranks make their operations in one order; process sets, Adasum and the collectives besides are `bpsfast.hvd`'s.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..orchestration.errors import UnsupportedError
from ..tensorflow import basics
from ..tensorflow.basics import barrier, local_rank, local_size, rank, shutdown, size
from ..tensorflow.broadcast import (
    BroadcastGlobalVariablesHook,
    broadcast as _broadcast,
    broadcast_global_variables,
    broadcast_variables as _broadcast_variables,
)
from ..tensorflow.compression import Compression, CompressionLike
from ..tensorflow.exchange import reduced
from ..tensorflow.ops import chosen, push_pull
from ..tensorflow.optimizer import DistributedOptimizer
from ..tensorflow.tape import DistributedGradientTape
from ..trainer import current as process
from ..trainer.reduce_op import Average, Sum

__all__ = [
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Sum",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job, as `bpsfast.init`. Ranks are what the launcher says.

    Raises
    ------
    UnsupportedError
        If *comm* or *process_sets* is given.
    """
    if comm or process_sets:
        raise UnsupportedError("init(comm, process_sets): bpsfast.hvd.tensorflow reduces over all ranks that the "
                               "launcher has started; process sets are bpsfast.hvd's, for PyTorch")
    basics.init()


def is_initialized() -> bool:
    """Return whether this process is in a job."""
    return process.session() is not None


def allreduce(tensor: Any, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
              compression: CompressionLike = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, name: str | None = None) -> Any:
    """Return *tensor* averaged (summed) over all ranks: `bpsfast.tensorflow.push_pull`, with factors of floating-point
    tensors before and after.
    """
    chosen(average, op)
    before = _scaled(tensor, prescale_factor)
    total = push_pull(before, "", average, device_dense, device_sparse, compression, op, name=name)
    return _scaled(total, postscale_factor)


def grouped_allreduce(tensors: Sequence[Any], average: bool | None = None, device_dense: str = "",
                      device_sparse: str = "", compression: CompressionLike = Compression.none,
                      op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0, *,
                      name: str) -> list[Any]:
    """Return *tensors* averaged (summed) over all ranks; all are under way at once, as ``name.0``, ``name.1``, ..."""
    mean = chosen(average, op)
    sums = reduced([_scaled(tensor, prescale_factor) for tensor in tensors],
                   [f"{name}.{place}" for place in range(len(tensors))], mean, compression=compression,
                   sparse_as_dense=False)
    return [_scaled(total, postscale_factor) for total in sums]


def _scaled(tensor: Any, factor: float) -> Any:
    if factor == 1.0:
        return tensor
    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tf.convert_to_tensor(tensor)
    if not values.dtype.is_floating:
        raise UnsupportedError(f"prescale_factor and postscale_factor are for floating-point tensors, got "
                               f"{values.dtype.name}")
    product = values * tf.cast(factor, values.dtype)
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(product, tensor.indices, tensor.dense_shape)
    return product


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Return rank *root_rank*'s *tensor* on all ranks: `bpsfast.tensorflow.broadcast`."""
    return _broadcast(tensor, root_rank, name=name)


def broadcast_variables(variables: Any, root_rank: int) -> Any:
    """Overwrite *variables* by those of rank *root_rank*: `bpsfast.tensorflow.broadcast_variables`."""
    return _broadcast_variables(variables, root_rank)
